from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.fakes.tiny_model import write_tiny_llama
from tests.fakes.tiny_shard import TinyShard
from tgi.errors import StartupError
from tgi.server.engine.device import Chosen, PromptScores
from tgi.server.engine.leader import LeaderDevice
from tgi.server.engine.plan import PrefillBudget
from tgi.server.engine.warmup import EVERYTHING, SCORED_TOPS, WarmUp, prefill_budget, size_cache
from tgi.server.ops.sampling import (
    FLAG_BAD_WORDS,
    FLAG_BIASED,
    FLAG_PENALISED,
    FLAG_RAW,
    FLAG_SAMPLED,
    FLAG_TYPICAL,
    FLAG_WATERMARK,
)
from tgi.server.platforms.detect import detect
from tgi.server.resolve import ServeArgs, resolve
from tgi.shard_client.messages import WarmupRequest

MIB = 1 << 20


def sizes(request: WarmupRequest, kv: int = 64 * MIB, most: int = 256 * MIB):
    return size_cache(request, block_size=16, bytes_per_block=MIB, kv_bytes=kv, at_most_bytes=most, max_position=8192)


def request(**values: int) -> WarmupRequest:
    return WarmupRequest(max_batch_prefill_tokens=4096, max_rows=128, **values)


@pytest.mark.row("D: Warm-up and capacity")
def test_defaults_follow_memory_and_model() -> None:
    found = sizes(request())
    assert found.num_blocks == 64
    assert found.max_total_tokens == 63 * 16
    assert found.max_input_tokens == found.max_total_tokens - 1
    assert sizes(request(), kv=2048 * MIB, most=4096 * MIB).max_total_tokens == 8192


def test_an_asked_pool_is_given_or_refused_with_the_numbers() -> None:
    assert sizes(request(max_batch_total_tokens=3000)).num_blocks == 189
    with pytest.raises(StartupError, match=r"5000 needs 314 MiB .* 256 MiB are free: at most 4080 tokens fit"):
        sizes(request(max_batch_total_tokens=5000))


def test_at_least_one_request_fits() -> None:
    found = sizes(request(max_total_tokens=2000))
    assert (found.num_blocks - 1) * 16 >= 2000
    with pytest.raises(StartupError, match="Not enough memory to handle `max_total_tokens=9000`"):
        sizes(request(max_total_tokens=9000))
    with pytest.raises(StartupError, match="`max_total_tokens=0`: the KV cache holds 0 tokens"):
        sizes(request(), kv=0, most=0)


def test_a_row_is_no_longer_than_the_positions_that_were_learned() -> None:
    def found(**values: int) -> int:
        memory = {"kv_bytes": 4096 * MIB, "at_most_bytes": 8192 * MIB}
        return size_cache(
            request(**values), block_size=16, bytes_per_block=MIB, **memory, max_position=8192, longest=1024
        ).max_total_tokens

    assert found() == 1024
    assert found(max_total_tokens=1024) == 1024
    with pytest.raises(StartupError, match=r"--max-total-tokens 1025 is more than the 1024 positions"):
        found(max_total_tokens=1025)


def test_lengths_must_leave_room_for_an_answer() -> None:
    with pytest.raises(StartupError, match="must be <"):
        sizes(request(max_total_tokens=500, max_input_tokens=500))


@pytest.mark.fault("lmdeploy#1740")
def test_a_slow_machine_reads_prompts_in_steps_of_a_second() -> None:
    assert prefill_budget(4096, 186, 930.0, True) == PrefillBudget(alone=930, beside_decode=186, chunked=True)
    assert prefill_budget(4096, 2000, 40_000.0, True) == PrefillBudget(alone=4096, beside_decode=2000, chunked=True)
    assert prefill_budget(512, 2000, 40_000.0, True) == PrefillBudget(alone=512, beside_decode=512, chunked=True)
    assert prefill_budget(4096, 186, 930.0, False) == PrefillBudget(alone=4096, beside_decode=4096, chunked=False)
    assert prefill_budget(4096, 186, 930.0, False, padded=True).padded


def test_the_worst_step_uses_whatever_takes_memory(tmp_path: Path) -> None:
    """Every control, and prompt logprobs with alternatives: what a step may need is found before the cache is sized."""
    shard = TinyShard(write_tiny_llama(tmp_path / "tiny"))
    scored: list[PromptScores | None] = []
    device = LeaderDevice(shard.runner, [])
    collect = device.collect

    def noting(launched: object) -> Chosen:
        chosen = collect(launched)
        scored.append(chosen.prompt_scores)
        return chosen

    device.collect = noting
    config = resolve(ServeArgs(model_id="m"), tmp_path, detect(), {"ATTENTION": "cpu"})
    WarmUp(device, config, detect(), 512)._prompts(4, 20, 2, EVERYTHING, scored=True)
    assert scored[0] is not None
    assert scored[0].top_ids.shape == (4 * 19, SCORED_TOPS)
    state = shard.runner._state
    assert state is not None
    every = FLAG_SAMPLED | FLAG_RAW | FLAG_TYPICAL | FLAG_PENALISED | FLAG_BIASED | FLAG_WATERMARK | FLAG_BAD_WORDS
    assert state.flags(np.arange(1, 5), np.full(4, 20)) == every


def test_no_request_is_longer_than_what_the_model_was_built_for(tmp_path: Path) -> None:
    device = LeaderDevice(TinyShard(write_tiny_llama(tmp_path / "tiny")).runner, [])
    config = resolve(ServeArgs(model_id="m"), tmp_path, detect(), {"ATTENTION": "cpu", "MAX_TOTAL_TOKENS": "64"})
    warm_up = WarmUp(device, config, detect(), 512)
    with pytest.raises(StartupError, match=r"^--max-total-tokens 65 is more than the MAX_TOTAL_TOKENS of 64"):
        warm_up.run(request(max_total_tokens=65))
    result, _ = warm_up.run(WarmupRequest(max_batch_prefill_tokens=64, max_rows=2, max_batch_total_tokens=256))
    assert result.max_total_tokens == 64
