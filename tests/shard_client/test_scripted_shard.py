"""The scripted shard itself: it keeps the rules of the stream, and it sees when they are broken."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.shard import BrokenRule, Script, ScriptedModel, ScriptedShard, ShardProcess, scripted_tokens
from tests.fakes.tokenizer import EOS_ID, packed
from tgi.enums import EndReason
from tgi.errors import Unavailable
from tgi.shard_client.client import ShardClient
from tgi.shard_client.messages import Admit, Command, Sampling, Step, Stopping

PROMPT = packed([1, 2, 3, 4, 5, 6])
BLOCK = 4


@pytest.fixture
def model() -> ScriptedModel:
    return ScriptedModel(Script(block_size=BLOCK, num_blocks=32, window=3, max_rows=4), 1, {})


def admit(handle: int, blocks: list[int], cached: int = 0, generated: bytes = b"", **stopping: Any) -> Admit:
    rules = Stopping(**{"max_new_tokens": 4, "eos_ids": (EOS_ID,)} | stopping)
    return Admit(handle, PROMPT, generated, cached, packed(blocks), Sampling(), rules)


def run(model: ScriptedModel, *commands: Command) -> list[Step]:
    for command in commands:
        model.apply(command)
    steps: list[Step] = []
    while (step := model.step()) is not None:
        steps.append(step)
        model.apply(Command(seen=step.number))
    return steps


def ids(steps: list[Step], handle: int) -> list[int]:
    return [step.token_ids[step.handles.index(handle)] for step in steps if handle in step.handles]


def test_an_answer_is_known_beforehand_and_resumes_where_it_was(model: ScriptedModel) -> None:
    expected = scripted_tokens(PROMPT, 4)
    assert ids(run(model, Command(admit=[admit(1, [1, 2, 3])])), 1) == expected
    resumed = admit(2, [1, 4, 5], cached=4, generated=packed(expected[:2]))
    assert ids(run(model, Command(admit=[resumed])), 2) == expected[2:]
    assert model.violations == []


def test_ends_and_errors_come_where_the_script_says(model: ScriptedModel) -> None:
    model.script.eos_at = lambda prompt_ids: 1
    steps = run(model, Command(admit=[admit(1, [1, 2, 3]), admit(2, [4, 5, 6], ignore_eos=True)]))
    assert (ids(steps, 1), steps[1].end_of(0)) == ([scripted_tokens(PROMPT, 1)[0], EOS_ID], EndReason.EOS)
    assert len(ids(steps, 2)) == 4
    model.script.error_at = lambda prompt_ids: 2
    steps = run(model, Command(admit=[admit(3, [1, 2, 3], ignore_eos=True)]))
    assert [error.handle for step in steps for error in step.errors] == [3]


def test_a_row_without_room_waits_and_that_is_said_once(model: ScriptedModel) -> None:
    steps = run(model, Command(admit=[admit(1, [1])]))
    assert [(list(step.progress_handles), list(step.computed_len)) for step in steps] == [([1], [4]), ([], [])]
    assert steps[-1].rows_waiting == 1
    steps = run(model, Command(grow=[(1, packed([2, 3])), (99, packed([7]))]))
    assert ids(steps, 1) == scripted_tokens(PROMPT, 4)
    assert model.violations == []


def test_the_window_stops_it(model: ScriptedModel) -> None:
    model.apply(Command(admit=[admit(1, [1, 2, 3])]))
    launched = 0
    while model.may_step and model.step() is not None:
        launched += 1
    assert launched == 3
    model.apply(Command(seen=1))
    assert model.may_step


@pytest.mark.parametrize(
    ("commands", "violation"),
    [
        ([Command(admit=[admit(2, [1, 2, 3])]), Command(admit=[admit(1, [4, 5, 6])])], "does not count up"),
        ([Command(admit=[admit(1, [0, 2, 3])])], "block 0"),
        ([Command(admit=[admit(1, [1, 2, 32])])], "block 32"),
        ([Command(admit=[admit(1, [1, 2, 3], cached=3)])], "rule 5"),
        ([Command(admit=[admit(1, [1, 2, 3], cached=4)])], "not its own"),
        ([Command(admit=[admit(1, [1, 2, 3]), admit(2, [1, 4, 5])])], "which another row holds"),
        ([Command(seen=9)], "though only 0 steps were sent"),
        ([Command(admit=[admit(handle, [handle, 10, 11]) for handle in range(1, 7)])], "beyond 4 rows"),
        ([Command(admit=[admit(1, [1, 2], generated=packed([5] * 4))])], "nothing left"),
    ],
)
def test_broken_rules_are_written_down(model: ScriptedModel, commands: list[Command], violation: str) -> None:
    run(model, *commands)
    assert any(violation in noted for noted in model.violations), model.violations


def test_a_block_given_away_too_early_is_seen(model: ScriptedModel) -> None:
    model.apply(Command(admit=[admit(1, [1, 2, 3])]))
    model.step()
    model.apply(Command(cancel=[1], admit=[admit(2, [4, 5, 6])]))  # given back and away in one command: fine
    model.step()
    other = Admit(3, packed([9] * 6), b"", 0, packed([4, 7, 8]), Sampling(), Stopping(4))
    model.apply(Command(admit=[other]))
    model.step()
    model.step()
    assert any("not its own" in noted for noted in model.violations)
    shard = ScriptedShard("/nowhere")
    shard.violations = model.violations
    with pytest.raises(BrokenRule, match="not its own"):
        shard.assert_rules_kept()


def test_it_can_be_held_and_let_go_step_by_step(tmp_path: Path) -> None:
    async def steps() -> None:
        client = ShardClient.connect(shard.uds_path)
        stream = client.stream()
        await anext(stream)
        shard.hold()
        stream.send(Command(admit=[admit(1, [1, 2, 3])]))
        waiting = asyncio.ensure_future(anext(stream))
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        assert not done
        shard.let(1)
        assert (await waiting).number == 1
        waiting = asyncio.ensure_future(anext(stream))
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        assert not done
        shard.let()
        assert (await waiting).number == 2
        await client.close()

    with ScriptedShard(tmp_path / "s", Script(block_size=BLOCK)) as shard:
        asyncio.run(steps())


@pytest.mark.fault("TGI#2593")
def test_a_killed_process_breaks_the_stream(tmp_path: Path) -> None:
    async def lose() -> None:
        client = ShardClient.connect(process.uds_path)
        stream = client.stream()
        first = await anext(stream)
        assert first.opening is not None
        assert first.opening.max_rows == 7
        process.kill()
        with pytest.raises(Unavailable):
            await anext(stream)
        await client.close()

    with ShardProcess(tmp_path / "s", "--rows", "7") as process:
        asyncio.run(lose())
    assert process.process is None
