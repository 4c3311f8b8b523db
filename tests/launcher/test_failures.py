"""What the launcher does about each death, with fake children: who is started again, how often, and what is said."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.fake_programs import CONFIG, Launched, launched, wait_for_end
from tgi.shard_client.finished import FinishedFile

DEATH = "shard 0 was killed by SIGKILL"


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


@contextmanager
def serving(tmp_path: Path, model: str, *argv: str, **variables: str) -> Iterator[Launched]:
    """A launcher that has announced its server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with launched(tmp_path, ["--model-id", model, "-p", port, *argv], **variables) as launcher:
        launcher.wait_for("Ready: ")
        launcher.wait_for("Shard ready in")
        yield launcher


def say_health(tmp_path: Path, **health: Any) -> None:
    """What the shards answer from now on; with `pid` that process alone."""
    new = tmp_path / "health.new"
    new.write_text(json.dumps({"phase": "idle", "hung_after_s": 30.0, **health}))
    new.replace(tmp_path / "health")


def finish_a_request(launcher: Launched, tmp_path: Path, finished: int = 1) -> None:
    """Returns when the launcher has asked for Health at least once since."""
    say_health(tmp_path, finished=finished)
    told = len(with_finished(launcher.events(), finished))
    launcher.wait_for_events(lambda events: with_finished(events, finished), told + 2)


def with_finished(events: list[dict[str, Any]], finished: int) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "health" and event["finished"] == finished]


def stop(launcher: Launched, number: signal.Signals = signal.SIGTERM) -> None:
    launcher.signal(number)
    assert launcher.exit_code() == 0, launcher.output + launcher.errors
    assert launcher.errors == ""
    launcher.assert_nobody_left()


@pytest.mark.fault("TGI#2593")
@pytest.mark.row("C: Process supervision, exit codes, signals")
@pytest.mark.row("G: 7 one failing request leaves its neighbours alone, a dead worker restarts")
def test_a_shard_that_dies_is_started_again(tmp_path: Path, model: str) -> None:
    with serving(tmp_path, model) as launcher:
        first = launcher.event("shard start")
        launcher.hit("shard start", signal.SIGKILL)
        launcher.wait_for_event("shard ready", 2)
        launcher.wait_for_count("Shard ready in", 2)
        second = launcher.last("shard start")
        assert second["argv"] == first["argv"]
        assert second["environ"] == first["environ"]
        assert second["path"] == first["path"]
        assert f"ShardFailed: rank 0: {DEATH}" in launcher.output
        assert "Starting the shards again at once (restart 1 of 5 until a request finishes)" in launcher.output
        assert launcher.names().count("router start") == 1, "the router stays"
        lines = [line for line in launcher.output.splitlines() if "loading on rank 0" in line]
        assert len(lines) == 2
        assert all("shard-manager{rank=0}" in line for line in lines)
        stop(launcher)
        assert launcher.names()[-1] == "shard stop"
        assert not Path(first["path"]).parent.exists()


def test_last_words_of_a_shard_are_told(tmp_path: Path, model: str) -> None:
    with serving(tmp_path, model) as launcher:
        launcher.hit("shard start", signal.SIGUSR1)
        launcher.wait_for_event("shard ready", 2)
        assert "ShardFailed: rank 0: shard 0 ended with exit code 3: the device is gone" in launcher.output
        stop(launcher)


def test_all_ranks_die_and_live_together(tmp_path: Path, model: str) -> None:
    with serving(tmp_path, model, "--num-shard", "2") as launcher:
        launcher.wait_for_event("shard ready", 2)
        first = [event for event in launcher.events() if event["event"] == "shard start"]
        os.kill(next(event["pid"] for event in first if event["rank"] == "1"), signal.SIGKILL)
        launcher.wait_for_event("shard ready", 4)
        for event in first:
            wait_for_end(event["pid"])
        second = [event for event in launcher.events() if event["event"] == "shard start"][2:]
        assert sorted(event["rank"] for event in second) == ["0", "1"]
        assert len({event["environ"]["MASTER_PORT"] for event in second}) == 1
        assert "ShardFailed: rank 1: shard 1 was killed by SIGKILL" in launcher.output
        stop(launcher)


def test_out_of_memory_shrinks_the_budget(tmp_path: Path, model: str) -> None:
    with serving(tmp_path, model, FAKE_CODE="75") as launcher:
        assert "--budget-scale" not in launcher.event("shard start")["argv"]
        for count, scale in ((2, "0.9"), (3, "0.81")):
            launcher.hit("shard start", signal.SIGUSR1)
            argv = launcher.wait_for_event("shard start", count)["argv"]
            assert argv[argv.index("--budget-scale") + 1] == scale
            launcher.wait_for_event("shard ready", count)
        launcher.hit("shard start", signal.SIGKILL)
        argv = launcher.wait_for_event("shard start", 4)["argv"]
        assert argv[argv.index("--budget-scale") + 1] == "0.81", "another death is no reason to shrink it"
        stop(launcher)


def test_who_ran_out_of_memory_is_to_blame_though_another_rank_ends_first(tmp_path: Path, model: str) -> None:
    """The group waits a moment for the one that has the reason."""
    with serving(tmp_path, model, "--num-shard", "2", FAKE_CODE="75", FAKE_CODE_0="3") as launcher:
        launcher.wait_for_event("shard ready", 2)
        first = {event["rank"]: event["pid"] for event in launcher.events() if event["event"] == "shard start"}
        os.kill(first["0"], signal.SIGUSR1)
        wait_for_end(first["0"])
        os.kill(first["1"], signal.SIGUSR1)
        argv = launcher.wait_for_event("shard start", 3)["argv"]
        assert "--budget-scale" in argv
        assert "ShardFailed: rank 1" in launcher.output
        stop(launcher)


def test_a_hung_shard_is_killed_and_started_again(tmp_path: Path, model: str) -> None:
    with serving(tmp_path, model, "--hung-after", "2", "--health-timeout", "0.8") as launcher:
        argv = launcher.event("shard start")["argv"]
        assert argv[argv.index("--hung-after") + 1] == "2"
        pid = launcher.event("shard start")["pid"]
        say_health(tmp_path, phase="running", step=412, since_s=2.1, hung_after_s=2.0, pid=pid)
        launcher.wait_for_event("shard ready", 2)
        wait_for_end(pid)
        assert "shard 0 hung: step 412 has run for 2.1 s (limit 2 s): killing it" in launcher.output
        launcher.wait_for_count("Shard ready in", 2)
        stop(launcher)


def test_a_silent_shard_is_killed_and_started_again(tmp_path: Path, model: str) -> None:
    with serving(tmp_path, model, "--health-timeout", "0.8") as launcher:
        pid = launcher.event("shard start")["pid"]
        os.kill(pid, signal.SIGSTOP)
        launcher.wait_for_event("shard ready", 2)
        wait_for_end(pid)
        assert "shard 0 is silent: Health unanswered for" in launcher.output
        stop(launcher)


def test_a_rank_that_never_answered_is_starting(tmp_path: Path, model: str) -> None:
    """However long it takes: here somebody takes the question and never answers."""
    argv = ["--model-id", model, "-p", free_port(), "--health-timeout", "0.1"]
    with launched(tmp_path, argv, FAKE_SHARD="loading") as launcher:
        pid = launcher.wait_for_event("shard start")["pid"]
        os.kill(pid, signal.SIGSTOP)
        with socket.socket(socket.AF_UNIX) as mute:  # connects, and never answers
            mute.bind(launcher.event("shard start")["path"])
            mute.listen()
            connection, _ = mute.accept()
            connection.recv(1)
            connection.close()
            mute.accept()[0].close()
        assert "Health unanswered" not in launcher.output
        os.kill(pid, signal.SIGCONT)
        stop(launcher)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_a_shard_that_hangs_in_the_first_start_ends_it(tmp_path: Path, model: str) -> None:
    say_health(tmp_path, phase="starting", since_s=1801.0, hung_after_s=1800.0)
    argv = ["--model-id", model, "-p", free_port(), "--health-timeout", "1"]
    with launched(tmp_path, argv, FAKE_ROUTER="waiting") as launcher:
        assert launcher.exit_code() == 1
        assert launcher.errors == (
            "Error: ShardCannotStart: rank 0: shard 0 hung: it has been starting for 1801.0 s (limit 1800 s)"
        )
        assert launcher.names().count("shard start") == 1


@pytest.mark.fault("TGI#2593")
def test_a_crash_loop_ends_the_server(tmp_path: Path, model: str) -> None:
    with serving(tmp_path, model, FAKE_SHARD="looping") as launcher:
        launcher.hit("shard start", signal.SIGKILL)
        assert launcher.exit_code() == 1
        assert launcher.errors == (
            "Error: ShardFailed: rank 0: shard 0 ended with exit code 1: the device is gone for good "
            "(given up: 5 restarts within 10 minutes, and no request has finished in between)"
        )
        assert launcher.names().count("shard start") == 6
        assert [f"(restart {number} of 5" in launcher.output for number in range(1, 7)] == [True] * 5 + [False]
        assert launcher.names()[-1] == "router stop"


def test_a_finished_request_begins_the_count_anew(tmp_path: Path, model: str) -> None:
    with serving(tmp_path, model, "--health-timeout", "0.4") as launcher:
        for count in range(2, 5):
            launcher.hit("shard start", signal.SIGKILL)
            launcher.wait_for_event("shard ready", count)
        assert "(restart 3 of 5" in launcher.output
        finish_a_request(launcher, tmp_path)
        launcher.hit("shard start", signal.SIGKILL)
        launcher.wait_for_count("(restart 1 of 5", 2)
        launcher.wait_for_event("shard ready", 5)
        stop(launcher)


def test_a_request_that_finishes_just_before_a_death_counts(tmp_path: Path, model: str) -> None:
    """Though Health has not told: the shard's file does."""
    with serving(tmp_path, model) as launcher:
        for count in range(2, 9):
            FinishedFile(Path(launcher.last("shard ready")["path"])).write(1)
            launcher.hit("shard ready", signal.SIGKILL)
            launcher.wait_for_event("shard ready", count)
        assert "(restart 2 of 5" not in launcher.output
        files = Path(launcher.last("shard ready")["path"]).parent
        stop(launcher)
        assert not files.exists()


@pytest.mark.row("C: Process supervision, exit codes, signals")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])
def test_a_router_that_dies_is_started_again_alone(tmp_path: Path, model: str, number: signal.Signals) -> None:
    with serving(tmp_path, model) as launcher:
        launcher.hit("router start", number)
        launcher.wait_for("Webserver serves again after")
        words = "was killed by SIGKILL" if number == signal.SIGKILL else "ended with exit code 4"
        assert f"WebserverFailed: router {words}" in launcher.output
        assert "Starting the webserver again at once (restart 1 of 5" in launcher.output
        first, second = [event for event in launcher.events() if event["event"] == "router start"]
        assert (first["argv"], first["environ"]) == (second["argv"], second["environ"])
        assert launcher.names().count("shard start") == 1, "the shards keep weights and cache"
        assert launcher.output.count("Ready: ") == 1
        stop(launcher)
        assert launcher.names()[-2:] == ["router stop", "shard stop"]


def test_a_router_that_dies_and_dies(tmp_path: Path, model: str) -> None:
    with serving(tmp_path, model) as launcher:
        for count in range(2, 8):
            launcher.hit("router ready", signal.SIGUSR1)
            if count < 7:
                launcher.wait_for_event("router ready", count)
        assert launcher.exit_code() == 1
        assert launcher.errors.startswith("Error: WebserverFailed: router ended with exit code 4 (given up: 5 restarts")
        assert launcher.names()[-1] == "shard stop"


def test_both_die_at_once(tmp_path: Path, model: str) -> None:
    with serving(tmp_path, model) as launcher:
        launcher.hit("shard start", signal.SIGKILL)
        launcher.hit("router start", signal.SIGKILL)
        launcher.wait_for("Webserver serves again after")
        launcher.wait_for_count("Shard ready in", 2)
        assert launcher.names().count("shard start") == launcher.names().count("router start") == 2
        assert "(restart 2 of 5" not in launcher.output, "one cause, one count"
        stop(launcher)


@pytest.mark.fault("TGI#1842")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", ["killed", "backing off", "loading", "router backing off"])
def test_a_stop_while_something_starts_again(tmp_path: Path, model: str, moment: str, number: signal.Signals) -> None:
    delay = "600" if moment.endswith("backing off") else "0.01"
    with serving(tmp_path, model, FAKE_FIRST_DELAY_S=delay) as launcher:
        victim = "router ready" if moment.startswith("router") else "shard ready"
        if moment.endswith("backing off"):  # the first restart has no pause
            launcher.hit(victim, signal.SIGKILL)
            launcher.wait_for_event(victim, 2)
        launcher.hit(victim, signal.SIGKILL)
        if moment.endswith("backing off"):
            launcher.wait_for("again in 600 s (restart 2 of 5")
        elif moment == "loading":
            launcher.wait_for_event("shard start", 2)
        else:
            launcher.wait_for("again at once (restart 1 of 5")
        stop(launcher, number)


def test_a_stop_ends_a_server_whose_shard_is_frozen(tmp_path: Path, model: str) -> None:
    with serving(tmp_path, model, "-g", "1") as launcher:
        launcher.hit("shard start", signal.SIGSTOP)
        stop(launcher)


@pytest.mark.slow
def test_fifty_restarts_leave_nothing_behind(tmp_path: Path, model: str) -> None:
    """Threads and file descriptors of the launcher: after 50 restarts as many as after the first ones."""
    with serving(tmp_path, model, "--health-timeout", "0.2") as launcher:
        counts: list[tuple[int, int]] = []
        for count in range(2, 27):
            launcher.hit("shard ready", signal.SIGKILL)
            launcher.wait_for_count("Shard ready in", count)
            launcher.hit("router ready", signal.SIGKILL)
            launcher.wait_for_event("router ready", count)
            finish_a_request(launcher, tmp_path, finished=count)
            counts.append(held(launcher))
        print("threads, file descriptors:", counts)
        assert max(counts[-5:]) <= max(counts[:5])
        stop(launcher)


def held(launcher: Launched) -> tuple[int, int]:
    process = Path(f"/proc/{launcher.process.pid}")
    return len(list((process / "task").iterdir())), len(list((process / "fd").iterdir()))
