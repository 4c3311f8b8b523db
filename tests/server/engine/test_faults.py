"""Injected faults, and memory that runs out, against an engine with the fake device."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.fakes.device import FakeDevice, expected_ids
from tests.server.engine.test_engine import BLOCK, Blocks, admit, make_engine, run
from tgi.enums import EndReason
from tgi.errors import StartupError
from tgi.server.batch.step import StepPlan
from tgi.server.engine import faults
from tgi.server.engine.engine import Engine
from tgi.server.engine.faults import FaultyDevice, StreamCut, Tamper, parse_faults
from tgi.server.engine.out_of_memory import is_out_of_memory
from tgi.shard_client.finished import FinishedFile, finished_path, read_finished
from tgi.shard_client.messages import Command

PROMPTS = {handle: [handle, 500, 600 + handle] for handle in range(1, 5)}
TOKENS = 5


def engine_with(text: str) -> tuple[Engine, Tamper]:
    tamper = Tamper()
    device = FaultyDevice(FakeDevice(BLOCK), parse_faults(text), tamper)
    engine, _ = make_engine(device)  # type: ignore[arg-type]
    return engine, tamper


def run_all(engine: Engine):
    # FaultyDevice hands on what the fake counts; only the block size is the fake's own.
    blocks = Blocks()
    engine.apply(Command(admit=[admit(h, prompt, TOKENS, blocks.take(4)) for h, prompt in PROMPTS.items()]))
    return run(engine)


@pytest.fixture(autouse=True)
def block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FaultyDevice, "block_size", BLOCK, raising=False)


def undisturbed(handle: int) -> list[int]:
    return expected_ids(PROMPTS[handle], TOKENS, 0, 1000)


@pytest.mark.parametrize("text", ["oom:step=1", "oom:step=3", "oom:every=2", "oom:min_rows=2", "raise:step=2"])
def test_a_step_that_fails_as_a_whole_is_done_in_parts_and_nobody_notices(text: str) -> None:
    ids, _, steps = run_all(engine_with(text)[0])
    assert ids == {handle: undisturbed(handle) for handle in PROMPTS}
    assert not [error for step in steps for error in step.errors]


class Small(FakeDevice):
    """Has memory for steps of a few tokens."""

    def forward(self, plan: StepPlan):
        if plan.num_tokens > 6:
            raise MemoryError("no room")
        return super().forward(plan)


def test_a_lone_prompt_that_is_too_large_is_read_in_pieces() -> None:
    engine, device = make_engine(Small(BLOCK))
    prompt = list(range(1, 48))
    engine.apply(Command(admit=[admit(1, prompt, TOKENS, Blocks().take(16))]))
    ids, _, steps = run(engine)
    assert ids == {1: expected_ids(prompt, TOKENS, 0, 1000)}
    assert device.largest_step <= 6
    assert not [error for step in steps for error in step.errors]


def test_several_ranks_do_not_try_again_by_halves() -> None:
    engine, _ = make_engine(Small(BLOCK))
    engine.limits.world_size = 2
    engine.apply(Command(admit=[admit(1, list(range(1, 48)), TOKENS, Blocks().take(16))]))
    with pytest.raises(MemoryError):
        engine.step()


@pytest.mark.parametrize(("kind", "code"), [("raise", "generation"), ("oom", "out_of_memory")])
def test_the_row_with_the_token_fails_alone(kind: str, code: str) -> None:
    ids, _, steps = run_all(engine_with(f"{kind}:token=603")[0])
    assert {h: ids[h] for h in (1, 2, 4)} == {h: undisturbed(h) for h in (1, 2, 4)}
    assert [(error.handle, error.code) for step in steps for error in step.errors] == [(3, code)]


def test_nan_hits_the_row_with_the_token() -> None:
    engine, _ = engine_with("nan:token=602")
    _, ends, _ = run_all(engine)
    assert {h: end for h, end in ends.items() if end is EndReason.NAN} == {2: EndReason.NAN}
    assert engine.finished == 3


def test_finished_counts_cancelled_rows_that_had_a_token_and_no_others() -> None:
    engine, _ = engine_with("slow:ms=0,step=1")
    blocks = Blocks()
    engine.apply(Command(admit=[admit(1, PROMPTS[1], TOKENS, blocks.take(4))]))
    engine.step()
    engine.apply(Command(admit=[admit(2, PROMPTS[2], TOKENS, blocks.take(4))]))
    engine.apply(Command(cancel=[1, 2]))
    assert engine.finished == 1


def test_what_has_finished_can_be_read_when_the_shard_is_gone(tmp_path: Path) -> None:
    socket = tmp_path / "s-0"
    assert read_finished(socket) == 0
    FinishedFile(socket).write(7)
    assert read_finished(socket) == 7
    again = FinishedFile(socket)
    assert read_finished(socket) == 0, "of this process"
    again.remove()
    assert not finished_path(socket).exists()
    with pytest.raises(StartupError, match="choose another --uds-path"):
        FinishedFile(tmp_path / "nowhere" / "s-0")


def test_once_fires_once_though_the_process_starts_again(tmp_path: Path) -> None:
    text = f"nan:once={tmp_path / 'fired'}"
    assert EndReason.NAN in run_all(engine_with(text)[0])[1].values()
    assert EndReason.NAN not in run_all(engine_with(text)[0])[1].values()


def test_armed_fires_only_while_its_file_is_there(tmp_path: Path) -> None:
    text = f"nan:armed={tmp_path / 'armed'}"
    assert EndReason.NAN not in run_all(engine_with(text)[0])[1].values()
    (tmp_path / "armed").touch()
    assert EndReason.NAN in run_all(engine_with(text)[0])[1].values()


def test_the_stream_is_cut_and_corrupted_once_each() -> None:
    engine, tamper = engine_with("cut:step=1;corrupt:step=2")
    _, _, steps = run_all(engine)
    with pytest.raises(StreamCut):
        tamper(steps[0])
    assert len(tamper(steps[1]).handles) == len(steps[1].token_ids) + 1
    assert tamper(steps[2]) is steps[2]


@pytest.mark.parametrize(("kind", "number"), [("kill", signal.SIGKILL), ("freeze", signal.SIGSTOP)])
def test_signals_go_to_the_process_itself(kind: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, signal_number: sent.append((pid, signal_number)))
    run_all(engine_with(f"{kind}:step=2")[0])
    assert sent == [(os.getpid(), number)]


def test_exit_hang_and_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(os, "_exit", done.append)
    monkeypatch.setattr(faults, "_hang", lambda: done.append("hang"))
    monkeypatch.setattr(time, "sleep", done.append)
    run_all(engine_with("exit:step=1;hang:step=2;slow:ms=250,step=3")[0])
    assert done == [1, "hang", 0.25]


def test_a_fault_is_of_the_first_rank_unless_it_names_another() -> None:
    assert [fault.rank for fault in parse_faults("oom;oom:rank=1,step=3")] == [0, 1]


@pytest.mark.parametrize("text", ["bang", "kill:when=3", "kill:step", "kill:step=x", "kill:every=0", "kill:once="])
def test_words_that_are_not_known_are_refused_by_name(text: str) -> None:
    with pytest.raises(StartupError, match="TGI_FAULTS"):
        parse_faults(text)


def test_what_counts_as_out_of_memory() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))
