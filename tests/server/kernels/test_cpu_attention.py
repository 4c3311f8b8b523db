"""The CPU kernels against dense attention and against themselves in other company."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.server.attention.dense import RAGGED, make_case
from tgi.server.attention.cpu_backend import CpuBackend
from tgi.server.kernels.cpu import attention as kernel
from tgi.server.kernels.cpu import parallel

CPU = torch.device("cpu")
LONG = [(1, 512), (1, 513), (1, 1300), (40, 300), (3, 700), (1, 1024)]


def run(case, heads, kv_heads, head_dim, **options) -> torch.Tensor:
    backend = CpuBackend()
    value_dim = case.value.shape[2]
    cache = backend.make_cache(case.num_blocks, 2, kv_heads, head_dim, case.query.dtype, CPU, value_dim)
    for keys, values in zip(cache.keys, cache.values, strict=True):
        keys.fill_(float("nan"))  # whoever reads what is not theirs shows it
        values[..., :value_dim].fill_(float("nan"))

    def write(key, value, slots):
        block, offset = slots // 64, slots % 64
        cache.keys[1][block, :, :, offset] = key
        cache.values[1][block, :, offset, :value_dim] = value

    case.fill(write, 64)
    step = backend.plan(case.inputs, cache, heads)
    return step(1, case.query, case.key, case.value, head_dim**-0.5, **options)


@pytest.mark.parametrize(
    "rows", [RAGGED, LONG, [(1, 1)], [(1, 64)], [(200, 200)]], ids=["ragged", "long", "1", "64", "200"]
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(9, 3, 64), (2, 2, 16), (8, 1, 80), (7, 1, 128), (4, 2, 40)]
)
def test_equals_dense_attention_in_float32(rows, heads, kv_heads, head_dim):
    case = make_case(rows, heads, kv_heads, head_dim, 64)
    out = run(case, heads, kv_heads, head_dim)
    torch.testing.assert_close(out.double(), case.expected(head_dim**-0.5), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
def test_half_precision_rounds_the_result_alone(dtype, tolerance):
    """Scores and sums are float32, so the error is that of rounding the output once."""
    case = make_case(RAGGED + LONG, 9, 3, 64, 64, dtype=dtype, seed=1)
    out, expected = run(case, 9, 3, 64), case.expected(0.125)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=tolerance)


@pytest.mark.parametrize("window", [None, 1, 50, 64, 600])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_window_softcap_and_sinks(window, softcap, with_sinks):
    case = make_case(RAGGED + LONG, 4, 2, 16, 64, seed=2)
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(3)) * 3 if with_sinks else None
    out = run(case, 4, 2, 16, window=window, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(out.double(), case.expected(0.25, window, softcap, sinks), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_alibi(window, softcap):
    case = make_case(RAGGED + LONG, 6, 2, 16, 64, seed=3)
    alibi = torch.tensor([0.5, 0.25, 0.1, 0.05, 0.01, 0.0])
    out = run(case, 6, 2, 16, window=window, softcap=softcap, alibi=alibi)
    torch.testing.assert_close(out.double(), case.expected(0.25, window, softcap, alibi=alibi), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "heads", "kv_heads"), [(24, 16, 4, 4), (16, 40, 6, 2), (576, 512, 32, 1)]
)
def test_values_of_another_width(head_dim, value_dim, heads, kv_heads, dtype):
    case = make_case(RAGGED + LONG, heads, kv_heads, head_dim, 64, dtype=dtype, seed=3, value_dim=value_dim)
    out = run(case, heads, kv_heads, head_dim)
    assert out.shape == (len(case.query), heads, value_dim)
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(out.double(), case.expected(head_dim**-0.5), atol=1e-5, rtol=tolerance)


def test_padding_rows_give_zeros_and_harm_nobody():
    case = make_case([(1, 0), (1, 9), (1, 0), (3, 3), (2, 0), (1, 600)], 4, 2, 16, 64, seed=4)
    out = run(case, 4, 2, 16)
    torch.testing.assert_close(out.double(), case.expected(0.25), atol=1e-5, rtol=1e-5)
    assert not out[[0, 2, 6, 7]].any()


def test_a_broken_row_shows_and_harms_nobody():
    case = make_case([(1, 90), (1, 90), (5, 90)], 4, 2, 16, 64, seed=5)
    whole = run(case, 4, 2, 16)
    case.query[0] = float("nan")
    case.key[1, 0, 3] = float("nan")  # heads 0 and 1 of row 1
    out = run(case, 4, 2, 16)
    assert out[0].isnan().all()
    assert out[1, :2].isnan().all()
    assert torch.equal(out[1, 2:], whole[1, 2:])
    assert torch.equal(out[2:], whole[2:])


def test_strides_of_a_fused_product():
    case = make_case(RAGGED, 6, 2, 16, 64, seed=6)
    plain = run(case, 6, 2, 16)
    packed = torch.empty(len(case.query), 10, 16)
    packed[:, :6], packed[:, 6:8], packed[:, 8:] = case.query, case.key, case.value
    case.query, case.key, case.value = packed[:, :6], packed[:, 6:8], packed[:, 8:]
    assert torch.equal(run(case, 6, 2, 16), plain)


@pytest.mark.fault("vllm#5898")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_result_has_the_same_bits_in_every_batch(dtype):
    rows = [(1, 700), (1, 33), (1, 1300), (17, 40), (1, 192), (1, 65)]
    case = make_case(rows, 9, 3, 64, 64, dtype=dtype, seed=7)
    together = run(case, 9, 3, 64)
    token = 0
    for index, (query_len, _) in enumerate(rows):
        alone = run(case.only(index), 9, 3, 64)
        assert torch.equal(alone, together[token : token + query_len])
        token += query_len


def test_threads_do_not_change_a_bit(monkeypatch):
    case = make_case(RAGGED + LONG, 9, 3, 64, 64, seed=8)
    shared = run(case, 9, 3, 64)
    monkeypatch.setattr(parallel, "_gomp_parallel", None)
    assert torch.equal(run(case, 9, 3, 64), shared)


def test_counters_of_parts_are_zero_again_after_every_layer():
    case = make_case(LONG, 9, 3, 64, 64, seed=9)
    backend = CpuBackend()
    cache = backend.make_cache(case.num_blocks, 1, 3, 64, torch.float32, CPU)
    case.fill(lambda key, value, slots: None, 64)
    step = backend.plan(case.inputs, cache, 9)
    first = step(0, case.query, case.key, case.value, 0.125)
    assert torch.equal(step(0, case.query, case.key, case.value, 0.125), first)


def test_the_cache_counts_its_bytes_and_pads_values_to_whole_vectors():
    backend = CpuBackend()
    cache = backend.make_cache(3, 2, 2, 40, torch.bfloat16, CPU)
    assert cache.keys[0].shape == (3, 2, 40, 64)
    assert cache.values[0].shape == (3, 2, 64, 48)
    assert cache.num_bytes == 3 * backend.bytes_per_block(2, 2, 40, torch.bfloat16)


def test_items_cover_every_query_and_key_once():
    from tgi.server.attention.cpu_backend import _plan_items

    lens = [(1, 10), (1, 1025), (50, 60), (0, 5), (1, 0), (8, 8)]
    items, _, num_parts = _plan_items([q for q, _ in lens], [c for _, c in lens], tile=8)
    assert num_parts == 3
    seen = sorted(map(tuple, items[:, : kernel.FIRST_PARTIAL + 1].tolist()))
    assert seen[0] == (0, 0, 1, 9, -1, 0, 0)
    assert seen[1:4] == [(1, 1, 1, 1024, part, 3, 0) for part in range(3)]
    tiles = [item for item in seen if item[0] == 2]
    assert [(t[1], t[2], t[3]) for t in tiles] == [(2 + 8 * i, 8 if i < 6 else 2, 10 + 8 * i) for i in range(7)]
    assert not [item for item in seen if item[0] == 3]
    assert seen[-2:] == [(4, 52, 1, -1, -1, 0, 3), (5, 53, 8, 0, -1, 0, 3)]
    assert items.dtype == np.int32
