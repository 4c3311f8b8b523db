from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from tests.fakes.device import Corrupt, FakeDevice, choose, expected_ids, extend
from tgi.enums import EndReason
from tgi.server.batch.table import RequestTable
from tgi.server.engine.engine import Engine, Limits
from tgi.server.engine.plan import PrefillBudget
from tgi.shard_client.messages import Admit, Command, Sampling, Step, Stopping

BLOCK = 4
EPOCH = 77


def pack(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()


def make_engine(
    device: FakeDevice | None = None,
    *,
    max_rows: int = 8,
    budget: int = 64,
    beside: int = 16,
    chunked: bool = True,
    window: int = 1000,
) -> tuple[Engine, FakeDevice]:
    device = device or FakeDevice(BLOCK)
    limits = Limits(window, PrefillBudget(budget, beside, chunked), num_blocks=200, kv_epoch=EPOCH)
    engine = Engine(device, RequestTable(max_rows, device.block_size), limits)
    engine.open()
    return engine, device


class Blocks:
    """Hands out block numbers, never one twice."""

    def __init__(self) -> None:
        self._numbers: Iterator[int] = itertools.count(1)

    def take(self, count: int) -> bytes:
        return pack([next(self._numbers) for _ in range(count)])


def admit(
    handle: int,
    prompt: list[int],
    max_new: int,
    blocks: bytes,
    *,
    seed: int = 0,
    generated: Sequence[int] = (),
    **stopping: object,
) -> Admit:
    return Admit(
        handle=handle,
        prompt_ids=pack(prompt),
        generated_ids=pack(generated),
        cached_len=0,
        blocks=blocks,
        sampling=Sampling(seed=seed),
        stopping=Stopping(max_new_tokens=max_new, **stopping),  # type: ignore[arg-type]
    )


def run(engine: Engine, limit: int = 500) -> tuple[dict[int, list[int]], dict[int, EndReason], list[Step]]:
    """Step until nothing runs; ids and end by handle."""
    ids: dict[int, list[int]] = {}
    ends: dict[int, EndReason] = {}
    steps: list[Step] = []
    for _ in range(limit):
        while engine.num_in_flight < engine.depth and (plan := engine.plan()) is not None:
            engine.launch(plan)
        if not engine.num_in_flight:
            return ids, ends, steps
        step = engine.collect()
        steps.append(step)
        for index, (handle, token) in enumerate(zip(step.handles, step.token_ids, strict=True)):
            ids.setdefault(handle, []).append(token)
            if step.end_of(index) is not EndReason.RUNNING:
                ends[handle] = step.end_of(index)
    raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize(("lag", "depth"), [(0, 1), (0, 2), (1, 2), (2, 2)])
def test_overlapped_and_plain_loops_give_the_same_ids(lag: int, depth: int) -> None:
    engine, _ = make_engine(FakeDevice(BLOCK, lag=lag, depth=depth))
    blocks = Blocks()
    prompts = {1: [1, 2, 3], 2: list(range(50)), 3: [9], 4: list(range(30, 60))}
    engine.apply(Command(admit=[admit(h, p, 10 + h, blocks.take(20), seed=h) for h, p in prompts.items()]))
    ids, ends, _ = run(engine)
    for handle, prompt in prompts.items():
        assert ids[handle] == expected_ids(prompt, 10 + handle, handle, 1000)
        assert ends[handle] is EndReason.LENGTH
    assert engine.table.num_free == 8


def test_eos_wins_over_length_on_the_last_token() -> None:
    engine, _ = make_engine()
    prompt = [5, 6]
    last = expected_ids(prompt, 4, 0, 1000)[3]
    engine.apply(Command(admit=[admit(1, prompt, 4, Blocks().take(4), eos_ids=(last,))]))
    _, ends, _ = run(engine)
    assert ends == {1: EndReason.EOS}


def test_stop_ids_end_and_ignored_eos_does_not() -> None:
    prompt = [5, 6]
    tokens = expected_ids(prompt, 8, 0, 1000)
    engine, _ = make_engine()
    blocks = Blocks()
    engine.apply(
        Command(
            admit=[
                admit(1, prompt, 8, blocks.take(6), stop_ids=(tokens[2],)),
                admit(2, prompt, 8, blocks.take(6), eos_ids=(tokens[2],), ignore_eos=True),
            ]
        )
    )
    ids, ends, _ = run(engine)
    assert ids == {1: tokens[:3], 2: tokens}
    assert ends == {1: EndReason.STOP_ID, 2: EndReason.LENGTH}


@pytest.mark.parametrize(("ignore_eos", "end"), [(False, EndReason.EOS), (True, EndReason.STOP_ID)])
@pytest.mark.parametrize("max_new_tokens", [3, 8])
def test_an_id_that_is_eos_and_stop_id_is_eos_unless_that_is_ignored(
    ignore_eos: bool, end: EndReason, max_new_tokens: int
) -> None:
    prompt = [5, 6]
    tokens = expected_ids(prompt, 8, 0, 1000)
    engine, _ = make_engine()
    both = {"eos_ids": (9, tokens[2]), "stop_ids": (tokens[2], 8), "ignore_eos": ignore_eos}
    engine.apply(Command(admit=[admit(1, prompt, max_new_tokens, Blocks().take(6), **both)]))
    ids, ends, _ = run(engine)
    assert ids == {1: tokens[:3]}
    assert ends == {1: end}


def test_a_resumed_row_goes_on_where_it_was() -> None:
    prompt = [3, 1, 4, 1, 5]
    tokens = expected_ids(prompt, 12, 42, 1000)
    engine, _ = make_engine()
    engine.apply(Command(admit=[admit(9, prompt, 12, Blocks().take(6), seed=42, generated=tokens[:7])]))
    ids, ends, _ = run(engine)
    assert ids == {9: tokens[7:]}
    assert ends == {9: EndReason.LENGTH}


def test_a_row_without_room_sits_out_and_goes_on_when_it_grows() -> None:
    engine, _ = make_engine()
    blocks = Blocks()
    prompt = [1, 2, 3]
    engine.apply(Command(admit=[admit(1, prompt, 9, blocks.take(1)), admit(2, [7], 9, blocks.take(4))]))
    ids, _, steps = run(engine)
    # Positions 0…3 have room: the ids chosen after positions 2 and 3 are known, the next has no place for its KV.
    assert len(ids[1]) == 2
    assert len(ids[2]) == 9, "the row beside it went on"
    assert steps[-1].rows_waiting == 1
    stalled = engine.idle_step()
    assert stalled is not None
    assert stalled.rows_waiting == 1
    engine.apply(Command(grow=[(1, blocks.take(3))]))
    more, ends, _ = run(engine)
    assert ids[1] + more[1] == expected_ids(prompt, 9, 0, 1000)
    assert ends == {1: EndReason.LENGTH}


@pytest.mark.parametrize("chunked", [True, False])
def test_a_prompt_with_room_for_a_part_of_it_waits_where_it_is_not_chunked(chunked: bool) -> None:
    engine, _ = make_engine(chunked=chunked)
    blocks = Blocks()
    engine.apply(Command(admit=[admit(1, list(range(10)), 3, blocks.take(1))]))  # four positions of ten
    if chunked:
        assert engine.step() is not None
    assert engine.step() is None
    stalled = engine.idle_step()
    assert stalled is not None
    assert stalled.rows_waiting == 1
    engine.apply(Command(grow=[(1, blocks.take(3))]))
    ids, ends, steps = run(engine)
    assert ids == {1: expected_ids(list(range(10)), 3, 0, 1000)}
    assert ends == {1: EndReason.LENGTH}
    assert steps[-1].rows_waiting == 0


def test_results_are_read_by_the_snapshot_when_a_row_is_given_away_in_one_command() -> None:
    engine, _ = make_engine(FakeDevice(BLOCK, lag=2, depth=2), max_rows=1)
    blocks = Blocks()
    engine.apply(Command(admit=[admit(1, [1, 2], 50, blocks.take(20))]))
    for _ in range(3):
        plan = engine.plan()
        assert plan is not None
        engine.launch(plan)
    # Three steps are in flight; row and blocks go to the next request at once (rule 1).
    engine.apply(Command(cancel=[1], admit=[admit(2, [8, 8], 5, blocks.take(3))]))
    ids, ends, _ = run(engine)
    assert ids == {2: expected_ids([8, 8], 5, 0, 1000)}
    assert ends == {2: EndReason.LENGTH}


def test_a_poisoned_request_fails_alone() -> None:
    device = FakeDevice(BLOCK)
    device.poison = lambda request: request.handle == 5
    engine, _ = make_engine(device)
    blocks = Blocks()
    engine.apply(Command(admit=[admit(h, [h, h], 6, blocks.take(4)) for h in range(1, 9)]))
    ids, ends, steps = run(engine)
    errors = [error for step in steps for error in step.errors]
    assert [(error.handle, error.code) for error in errors] == [(5, "generation")]
    assert "poisoned" in errors[0].message
    assert ids == {h: expected_ids([h, h], 6, 0, 1000) for h in range(1, 9) if h != 5}
    assert all(end is EndReason.LENGTH for end in ends.values())
    assert engine.table.num_free == 8


def test_nan_ends_its_own_row_only() -> None:
    device = FakeDevice(BLOCK)
    device.nan = lambda request: request.handle == 1
    engine, _ = make_engine(device)
    blocks = Blocks()
    engine.apply(Command(admit=[admit(h, [h], 3, blocks.take(2)) for h in (1, 2)]))
    ids, ends, _ = run(engine)
    assert ends == {1: EndReason.NAN, 2: EndReason.LENGTH}
    assert len(ids[2]) == 3


def test_a_long_prompt_is_read_beside_decoding_rows_within_the_budget() -> None:
    engine, device = make_engine(budget=64, beside=16)
    blocks = Blocks()
    engine.apply(Command(admit=[admit(1, [1], 40, blocks.take(12))]))
    first = engine.step()
    assert first is not None
    engine.apply(Command(admit=[admit(2, list(range(100)), 4, blocks.take(30))]))
    device.largest_step = 0
    ids, _, steps = run(engine)
    assert device.largest_step <= 16
    assert all(1 in step.handles for step in steps if step.progress_handles), "the stream beside it never pauses"
    assert ids[2] == expected_ids(list(range(100)), 4, 0, 1000)
    computed = [value for step in steps for value in step.computed_len]
    assert computed == sorted(computed)
    assert computed[-1] < 100


def test_bad_admissions_are_that_requests_error() -> None:
    engine, _ = make_engine(max_rows=1)
    blocks = Blocks()
    engine.apply(
        Command(
            admit=[
                admit(1, [1, 2], 5, pack([500])),
                admit(2, [1, 2], 5, pack([0, 1])),
                admit(3, [1, 2], 2, blocks.take(4), generated=[1, 2]),
                admit(4, [1, 2], 5, b""),
                admit(5, [1, 2], 5, blocks.take(4)),
                admit(6, [1, 2], 5, blocks.take(4)),
            ]
        )
    )
    ids, _, steps = run(engine)
    assert sorted(error.handle for step in steps for error in step.errors) == [1, 2, 3, 4, 6]
    assert list(ids) == [5]


def test_a_bad_grow_ends_its_row_and_unknown_handles_are_ignored() -> None:
    engine, _ = make_engine()
    blocks = Blocks()
    engine.apply(Command(admit=[admit(1, [1], 9, blocks.take(3)), admit(2, [2], 9, blocks.take(3))]))
    engine.apply(Command(cancel=[99], grow=[(98, blocks.take(1)), (1, pack([4000]))]))
    ids, _, steps = run(engine)
    assert [error.handle for step in steps for error in step.errors] == [1]
    assert list(ids) == [2]


def test_the_window_closes_until_the_router_has_answered() -> None:
    engine, _ = make_engine(window=4)
    engine.apply(Command(admit=[admit(1, [1], 30, Blocks().take(10))]))
    for _ in range(4):
        assert engine.window_is_open
        assert engine.step() is not None
    assert not engine.window_is_open
    engine.apply(Command(seen=2))
    assert engine.window_is_open


def test_a_new_stream_starts_with_no_rows_and_step_zero() -> None:
    engine, _ = make_engine(FakeDevice(BLOCK, lag=1, depth=2))
    blocks = Blocks()
    engine.apply(Command(admit=[admit(1, [1], 30, blocks.take(10))]))
    for _ in range(2):
        plan = engine.plan()
        assert plan is not None
        engine.launch(plan)
    opening = engine.open()
    assert opening.number == 0
    assert opening.kv_epoch == EPOCH
    assert opening.opening is not None
    assert opening.opening.block_size == BLOCK
    assert opening.free_rows == 8
    engine.apply(Command(admit=[admit(1, [4], 3, blocks.take(2))]))
    ids, _, _ = run(engine)
    assert ids == {1: expected_ids([4], 3, 0, 1000)}


def test_stepping_by_hand_runs_exactly_the_rows_asked_for() -> None:
    engine, _ = make_engine()
    blocks = Blocks()
    engine.apply(Command(admit=[admit(1, list(range(10)), 5, blocks.take(5)), admit(2, [2], 5, blocks.take(5))]))
    step = engine.step([1], {1: 4})
    assert step is not None
    assert list(step.progress_handles) == [1]
    assert list(step.computed_len) == [4]
    step = engine.step([1])
    assert step is not None
    assert list(step.handles) == [1]
    step = engine.step([2, 1])
    assert step is not None
    assert list(step.handles) == [2, 1]


def test_the_fake_device_notices_foreign_kv() -> None:
    """The oracle of the seam tests is itself able to fail."""
    engine, _ = make_engine()
    shared = pack([3])
    engine.apply(Command(admit=[admit(1, [1, 2], 3, shared)]))
    assert engine.step() is not None
    engine.apply(Command(admit=[admit(2, [8, 9], 3, shared)]))
    with pytest.raises(Corrupt, match="foreign KV"):
        run(engine)


def test_digests_make_ids_depend_on_the_whole_prefix() -> None:
    assert choose(extend(extend(b"", 1), 2), 0, 1000) != choose(extend(extend(b"", 2), 1), 0, 1000)
    assert np.unique([choose(extend(b"", token), 0, 1000) for token in range(50)]).size > 40


def test_more_blocks_than_a_row_can_have_are_that_requests_error() -> None:
    engine, device = make_engine()
    device.max_blocks = 5
    blocks = Blocks()
    engine.apply(Command(admit=[admit(1, [1], 9, blocks.take(6)), admit(2, [2], 9, blocks.take(3))]))
    engine.apply(Command(grow=[(2, blocks.take(2))]))
    step = engine.step()
    assert step is not None
    assert [(error.handle, error.message) for error in step.errors] == [(1, "6 blocks; a request can have 5")]
    assert list(step.handles) == [2]
    engine.apply(Command(grow=[(2, blocks.take(1))]))
    step = engine.step()
    assert step is not None
    assert [error.handle for error in step.errors] == [2]
    assert engine.table.num_live == 0
