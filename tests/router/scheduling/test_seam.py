"""The seams of router and shard under random histories. The long form is in the soak lane."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.fakes.scripted_shard import PlainShard, alone
from tests.fakes.seam import Workload, drive
from tgi.router.memory import radix
from tgi.router.scheduling.core import SchedulerCore

NEAR_THE_END = (1 << 64) - 40


def run(load: Workload, seed: int, lag: int) -> tuple[SchedulerCore, PlainShard]:
    epochs = itertools.count(2)
    shard = PlainShard(
        num_blocks=load.num_blocks,
        block_size=load.block_size,
        window=load.window,
        max_rows=6,
        prefill_budget=max(24, load.block_size),
        lag=lag,
        speculated=load.speculated,
        vocab_size=load.vocab_size,
        num_host_blocks=load.num_host_blocks,
    )
    core = drive(
        shard,
        lambda: shard.renew_cache(next(epochs)),
        lambda request: alone(request, load.vocab_size),
        load,
        seed,
    )
    assert shard.max_ahead <= load.window
    return core, shard


def tight(block_size: int, window: int, speculated: int = 0, **fields: int | bool) -> Workload:
    """A pool that some three rows fill, whatever the block size."""
    return Workload(
        num_blocks=max(7, 160 // block_size + 2),
        block_size=block_size,
        window=window,
        vocab_size=120,
        speculated=speculated,
        longest_prompt=max(40, 2 * block_size),
        longest_answer=max(70, block_size // 2),
        operations=900 if block_size < 64 else 400,
        **fields,  # pyright: ignore[reportArgumentType]
    )


@pytest.mark.fault("TGI#3043")
@pytest.mark.fault("vllm#22808")
@pytest.mark.parametrize("block_size", [1, 16, 64, 256])
@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("speculated", [0, 4])
def test_random_histories(block_size: int, lag: int, speculated: int) -> None:
    for seed, window in enumerate((4, 9)):
        run(tight(block_size, window, speculated), seed, lag)


@pytest.mark.parametrize("speculated", [0, 4])
def test_random_histories_without_sharing(speculated: int) -> None:
    for seed in range(2):
        run(tight(16, 4, speculated, prefix_caching=False), seed, lag=1)


@pytest.mark.parametrize("block_size", [1, 16, 64, 256])
@pytest.mark.parametrize("lag", [0, 2])
def test_random_histories_with_a_host_tier(block_size: int, lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams break, with copies on the way that then never happen. Few tokens are worth a copy here."""
    monkeypatch.setattr(radix, "RETURN_WORTH", 4)
    num_offloaded = num_returned = 0
    for seed, num_host_blocks in enumerate((6, 40, 1_000)):
        load = tight(block_size, 4, num_host_blocks=num_host_blocks)
        core, _ = run(replace(load, breaks=0.005, renewals=0.1, longest_prompt=3 * load.longest_prompt), seed, lag)
        num_offloaded += core.stats.offloaded_blocks
        num_returned += core.stats.returned_blocks
    assert num_offloaded > 20
    assert num_returned > 10


def test_handles_run_out_on_the_way() -> None:
    for seed in range(3):
        run(tight(4, 4, next_handle=NEAR_THE_END), seed, lag=1)


def test_the_histories_do_what_they_are_for() -> None:
    """Rows give way, prefixes are found, streams break: else the tests above would prove little."""
    cores = [run(tight(block_size, 4), seed=7, lag=2)[0] for block_size in (4, 16, 64)]
    assert sum(core.stats.preemptions for core in cores) > 10
    assert sum(core.stats.cached_tokens for core in cores) > 500
    assert sum(sum(core.stats.inference_failure.values()) for core in cores) >= 3


@pytest.mark.soak
@pytest.mark.parametrize("block_size", [1, 16, 64, 256])
@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("speculated", [0, 4])
def test_many_random_histories(block_size: int, lag: int, speculated: int) -> None:
    for seed in range(40):
        run(tight(block_size, 4 + seed % 8, speculated), 1_000 + seed, lag)
