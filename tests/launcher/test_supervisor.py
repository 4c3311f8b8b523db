"""The launcher as a process, with fake children: order, signals, grace, exit codes, secrets, nobody left."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import pytest

from tests.launcher.fake_programs import CONFIG, launched, wait_for_end

KEY = "sk-launcher-test-0123"


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


@pytest.fixture
def port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.row("C: Process supervision, exit codes, signals")
def test_start_announce_and_stop_in_order(tmp_path: Path, model: str, port: str) -> None:
    with launched(tmp_path, ["--model-id", model, "--port", port, "--hostname", "127.0.0.1"]) as launcher:
        launcher.wait_for(f"curl http://127.0.0.1:{port}/v1/chat/completions -H 'Content-Type: application/json' -d '")
        launcher.wait_for("Shard ready in")
        lines = launcher.output.splitlines()
        connected = next(i for i, line in enumerate(lines) if line.endswith(": Connected"))
        ready = next(i for i, line in enumerate(lines) if f"Ready: http://127.0.0.1:{port} serves {model}" in line)
        assert connected < ready
        assert any("shard-manager{rank=0}" in line and "loading on rank 0" in line for line in lines)
        assert any("shard-manager{rank=0}" in line and "a line that is no JSON" in line for line in lines)
        assert any("shard-manager{rank=0}" in line and "Shard ready in" in line for line in lines)
        socket_path = Path(launcher.event("shard start")["path"])
        assert socket_path.exists()
        launcher.signal(signal.SIGTERM)
        assert launcher.exit_code() == 0
        assert launcher.names()[-3:] == ["router stopping", "router stop", "shard stop"]
        assert launcher.errors == ""
        assert not socket_path.parent.exists(), "the directory of the sockets is left"
        launcher.assert_nobody_left()


def test_router_starts_without_waiting_for_the_shard(tmp_path: Path, model: str, port: str) -> None:
    with launched(tmp_path, ["--model-id", model, "-p", port], FAKE_SHARD="loading") as launcher:
        launcher.wait_for("waiting for the shard")
        launcher.wait_for("loading on rank 0")
        launcher.signal(signal.SIGTERM)
        assert launcher.exit_code() == 0
        # The shard tells that it began to wait whenever it comes to that: only the ends have an order.
        ends = [name for name in launcher.names() if name.endswith(" stop")]
        assert ends == ["router stop", "shard stop"]
        assert "Ready" not in launcher.output


@pytest.mark.fault("TGI#1842")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("phase", ["loading", "serving"])
def test_every_stop_signal_ends_it_cleanly(
    tmp_path: Path, model: str, port: str, number: signal.Signals, phase: str
) -> None:
    mode = "loading" if phase == "loading" else ""
    with launched(tmp_path, ["--model-id", model, "-p", port], FAKE_SHARD=mode) as launcher:
        launcher.wait_for("loading on rank 0" if phase == "loading" else "Ready: ")
        launcher.signal(number)
        assert launcher.exit_code() == 0
        assert f"{number.name} received: stopping" in launcher.output
        assert launcher.errors == ""


def test_under_nohup_a_closed_terminal_stops_nothing(tmp_path: Path, model: str, port: str) -> None:
    with launched(tmp_path, ["--model-id", model, "-p", port], FAKE_SIGHUP="SIG_IGN") as launcher:
        launcher.wait_for("Ready: ")
        launcher.signal(signal.SIGHUP)
        launcher.signal(signal.SIGTERM)
        assert launcher.exit_code() == 0
        assert "SIGTERM received: stopping" in launcher.output
        assert "SIGHUP" not in launcher.output


@pytest.mark.fault("TGI#2035")
def test_running_requests_may_finish(tmp_path: Path, model: str, port: str) -> None:
    with launched(tmp_path, ["--model-id", model, "-p", port], FAKE_ROUTER="draining") as launcher:
        launcher.wait_for("Ready: ")
        launcher.wait_for_event("shard ready")
        launcher.signal(signal.SIGTERM)
        launcher.wait_for("finishing requests")
        assert launcher.process.poll() is None
        assert "shard stop" not in launcher.names()
        os.kill(launcher.event("router start")["pid"], signal.SIGUSR1)  # the last request is done
        assert launcher.exit_code() == 0
        assert launcher.names()[-2:] == ["router stop", "shard stop"]


def test_grace_period_ends(tmp_path: Path, model: str, port: str) -> None:
    argv = ["--model-id", model, "-p", port, "--graceful-termination-timeout", "0"]
    with launched(tmp_path, argv, FAKE_ROUTER="stubborn", FAKE_SHARD="stubborn") as launcher:
        launcher.wait_for("Ready: ")
        launcher.wait_for_event("shard ready")
        launcher.signal(signal.SIGTERM)
        assert launcher.exit_code() == 0
        assert "Not ended after 0 s: killing" in launcher.output


def test_second_signal_hurries(tmp_path: Path, model: str, port: str) -> None:
    argv = ["--model-id", model, "-p", port]
    with launched(tmp_path, argv, FAKE_ROUTER="stubborn", FAKE_SHARD="stubborn") as launcher:
        launcher.wait_for("Ready: ")
        launcher.wait_for_event("shard ready")
        launcher.signal(signal.SIGINT)
        launcher.wait_for("Terminating webserver")
        launcher.signal(signal.SIGINT)
        assert launcher.exit_code() == 0
        assert "SIGINT received again: stopping now" in launcher.output


@pytest.mark.parametrize("mode", ["clear", "clear on stderr"])
def test_shard_that_cannot_start_tells_why_in_one_line(tmp_path: Path, model: str, port: str, mode: str) -> None:
    with launched(tmp_path, ["--model-id", model, "-p", port], FAKE_SHARD=mode) as launcher:
        assert launcher.exit_code() == 1
        reason = "the file model.safetensors is cut off; fetch it again"
        assert launcher.errors == f"Error: ShardCannotStart: rank 0: {reason}"
        assert reason not in launcher.output
        assert "Traceback" not in launcher.output
        launcher.assert_nobody_left()


def test_shard_that_crashes_at_start_shows_its_last_lines(tmp_path: Path, model: str, port: str) -> None:
    with launched(tmp_path, ["--model-id", model, "-p", port], FAKE_SHARD="traceback") as launcher:
        assert launcher.exit_code() == 1
        assert launcher.errors == (
            "Error: ShardCannotStart: rank 0: shard 0 ended with exit code 1: RuntimeError: surprise"
        )
        assert "shard 0: Traceback (most recent call last):" in launcher.output


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("clear", "the tokenizer cannot be read"),
        ("logged", "no chat template"),
        ("traceback", "router ended with exit code 1: RuntimeError: surprise"),
    ],
)
def test_router_that_cannot_start_tells_why(tmp_path: Path, model: str, port: str, mode: str, reason: str) -> None:
    with launched(tmp_path, ["--model-id", model, "-p", port], FAKE_ROUTER=mode) as launcher:
        assert launcher.exit_code() == 1
        assert launcher.errors == f"Error: WebserverCannotStart: {reason}"
        assert launcher.names()[-1] == "shard stop"


def test_shard_dying_while_requests_finish_is_an_error(tmp_path: Path, model: str, port: str) -> None:
    argv = ["--model-id", model, "-p", port, "-g", "1"]
    with launched(tmp_path, argv, FAKE_ROUTER="stubborn") as launcher:
        launcher.wait_for("Ready: ")
        launcher.wait_for_event("shard ready")
        launcher.signal(signal.SIGTERM)
        launcher.wait_for("finishing requests")
        os.kill(launcher.event("shard start")["pid"], signal.SIGUSR1)
        assert launcher.exit_code() == 1
        assert launcher.errors.startswith("Error: ShardFailed: rank 0")


def test_children_die_with_a_killed_launcher(tmp_path: Path, model: str, port: str) -> None:
    with launched(tmp_path, ["--model-id", model, "-p", port], FAKE_ROUTER="stubborn") as launcher:
        launcher.wait_for("Ready: ")
        launcher.wait_for_event("shard ready")
        launcher.process.kill()
        assert launcher.exit_code() == -signal.SIGKILL
        for name in ("shard start", "router start"):
            wait_for_end(launcher.event(name)["pid"])
        assert "shard stop" not in launcher.names()


@pytest.mark.row("B: API key (Bearer)")
@pytest.mark.parametrize("way", ["--api-key KEY", "--api-key=KEY", "API_KEY"])
def test_api_key_is_in_no_command_line_and_no_log(tmp_path: Path, model: str, port: str, way: str) -> None:
    argv = ["--model-id", model, "-p", port]
    variables = {"LOG_LEVEL": "trace"}
    if way == "API_KEY":
        variables["API_KEY"] = KEY
    else:
        argv += way.replace("KEY", KEY).split()
    with launched(tmp_path, argv, **variables) as launcher:
        launcher.wait_for("curl ")
        shard, router = launcher.event("shard start"), launcher.event("router start")
        for pid in (launcher.process.pid, shard["pid"], router["pid"]):
            assert KEY not in Path(f"/proc/{pid}/cmdline").read_text()
        assert router["environ"]["API_KEY"] == KEY
        assert KEY not in json.dumps(shard["environ"])
        launcher.signal(signal.SIGTERM)
        assert launcher.exit_code() == 0
        assert 'api_key: "***"' in launcher.output
        assert "Authorization: Bearer YOUR_API_KEY" in launcher.output
        assert KEY not in launcher.output + launcher.errors


@pytest.mark.row("F: JSON logs, `Connected` line")
def test_json_output_is_json_throughout(tmp_path: Path, model: str, port: str) -> None:
    with launched(tmp_path, ["--model-id", model, "-p", port, "--json-output"]) as launcher:
        launcher.wait_for("curl ")
        launcher.signal(signal.SIGTERM)
        assert launcher.exit_code() == 0
        entries = [json.loads(line) for line in launcher.output.splitlines()]
    assert {"level": "INFO", "message": "Connected"} in entries, "the router's line was changed"
    ours = [entry for entry in entries if "fields" in entry]
    assert all(entry["target"] == "text_generation_launcher" for entry in ours)
    shard = next(entry for entry in ours if entry["fields"]["message"] == "loading on rank 0")
    assert shard["span"] == {"name": "shard-manager", "rank": 0}


def test_much_output_neither_blocks_nor_is_lost(tmp_path: Path, model: str, port: str) -> None:
    with launched(tmp_path, ["--model-id", model, "-p", port], FAKE_ROUTER="noisy") as launcher:
        launcher.wait_for("curl ")
        launcher.signal(signal.SIGTERM)
        assert launcher.exit_code() == 0
        assert launcher.output.splitlines().count("x" * 200) == 2000


def test_two_shards_share_one_meeting_point(tmp_path: Path, model: str, port: str) -> None:
    argv = ["--model-id", model, "-p", port, "--num-shard", "2", "--shard-uds-path", str(tmp_path / "s")]
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / "s-0"))
    stale.close()  # nobody listens any more, the file is left
    with launched(tmp_path, argv) as launcher:
        launcher.wait_for("Ready: ")
        launcher.wait_for_event("shard ready")
        launcher.wait_for("loading on rank 1")
        starts = [event for event in launcher.events() if event["event"] == "shard start"]
        assert sorted(event["rank"] for event in starts) == ["0", "1"]
        assert sorted(event["path"] for event in starts) == [str(tmp_path / "s-0"), str(tmp_path / "s-1")]
        assert len({event["environ"]["MASTER_PORT"] for event in starts}) == 1
        launcher.signal(signal.SIGTERM)
        assert launcher.exit_code() == 0
        assert launcher.names().index("router stop") < launcher.names().index("shard stop")
    assert not (tmp_path / "s-0").exists()
    assert not (tmp_path / "s-1").exists()


@pytest.mark.row("C: Download / safetensors conversion")
def test_hub_model_is_fetched_first(tmp_path: Path, port: str) -> None:
    with launched(tmp_path, ["--model-id", "org/model", "--revision", "main", "-p", port]) as launcher:
        launcher.wait_for("Ready: ")
        launcher.wait_for_event("shard ready")
        assert launcher.names()[0] == "download"
        assert launcher.event("download")["argv"][:2] == ["download-weights", "org/model"]
        launcher.signal(signal.SIGTERM)
        assert launcher.exit_code() == 0
    events = len(launcher.events())
    with launched(tmp_path, ["--model-id", "org/model", "-p", port]) as again:
        again.wait_for("Ready: ")
        assert "download" not in again.names()[events:], "what is here was fetched again"
        again.signal(signal.SIGTERM)
        assert again.exit_code() == 0


def test_failed_download_tells_why(tmp_path: Path, port: str) -> None:
    with launched(tmp_path, ["--model-id", "org/model", "-p", port], FAKE_SHARD="no-download") as launcher:
        assert launcher.exit_code() == 1
        assert launcher.errors == "Error: DownloadError: the hub has no such model"


def test_stop_during_the_download(tmp_path: Path, port: str) -> None:
    with launched(tmp_path, ["--model-id", "org/model", "-p", port], FAKE_SHARD="slow-download") as launcher:
        launcher.wait_for("fetching")
        launcher.signal(signal.SIGINT)
        assert launcher.exit_code() == 0
        assert launcher.names() == ["download"]
