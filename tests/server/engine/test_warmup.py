from __future__ import annotations

import pytest

from tgi.errors import StartupError
from tgi.server.engine.plan import PrefillBudget
from tgi.server.engine.warmup import prefill_budget, size_cache
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


def test_lengths_must_leave_room_for_an_answer() -> None:
    with pytest.raises(StartupError, match="must be <"):
        sizes(request(max_total_tokens=500, max_input_tokens=500))


@pytest.mark.fault("lmdeploy#1740")
def test_a_slow_machine_reads_prompts_in_steps_of_a_second() -> None:
    assert prefill_budget(4096, 186, 930.0, True) == PrefillBudget(alone=930, beside_decode=186, chunked=True)
    assert prefill_budget(4096, 2000, 40_000.0, True) == PrefillBudget(alone=4096, beside_decode=2000, chunked=True)
    assert prefill_budget(512, 2000, 40_000.0, True) == PrefillBudget(alone=512, beside_decode=512, chunked=True)
    assert prefill_budget(4096, 186, 930.0, False) == PrefillBudget(alone=4096, beside_decode=4096, chunked=False)
