"""The torch backend against dense causal attention, row by row, over a cache whose other slots hold garbage."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.server.attention.dense import RAGGED, Case, make_case
from tgi.server.attention.torch_backend import TorchBackend
from tgi.server.ops import paged_attention as op
from tgi.server.ops.kv_write import kv_write


def run(case: Case, heads, kv_heads, head_dim, block_size, **options) -> torch.Tensor:
    backend = TorchBackend("torch", block_size)
    value_dim = case.value.shape[2]
    cache = backend.make_cache(case.num_blocks, 2, kv_heads, head_dim, case.query.dtype, torch.device("cpu"), value_dim)
    for layer in (*cache.keys, *cache.values):
        layer.fill_(float("nan"))  # whoever reads what is not theirs shows it
    case.fill(lambda k, v, slots: kv_write(cache.keys[1], cache.values[1], k, v, slots), block_size)
    step = backend.plan(case.inputs, cache, heads)
    return step(1, case.query, case.key, case.value, head_dim**-0.5, **options)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 3), (4, 1)])
def test_equals_dense_causal_attention_on_a_ragged_mix(head_dim, block_size, heads, kv_heads):
    case = make_case(RAGGED, heads, kv_heads, head_dim, block_size)
    out = run(case, heads, kv_heads, head_dim, block_size)
    torch.testing.assert_close(out.double(), case.expected(head_dim**-0.5), atol=1e-5, rtol=1e-5)


@pytest.mark.row("D: Window size")
@pytest.mark.parametrize("window", [1, 7, 64, 1000])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_window_softcap_and_sinks(window, softcap, with_sinks):
    case = make_case(RAGGED, 6, 2, 16, 16, seed=1)
    sinks = torch.randn(6, generator=torch.Generator().manual_seed(2)) * 3 if with_sinks else None
    out = run(case, 6, 2, 16, 16, window=window, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(out.double(), case.expected(0.25, window, softcap, sinks), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 7])
def test_alibi_and_values_of_another_width(window):
    case = make_case(RAGGED, 6, 2, 24, 16, seed=1, value_dim=16)
    alibi = torch.tensor([0.5, 0.25, 0.1, 0.05, 0.01, 0.0])
    out = run(case, 6, 2, 24, 16, window=window, alibi=alibi)
    assert out.shape == (len(case.query), 6, 16)
    torch.testing.assert_close(out.double(), case.expected(24**-0.5, window=window, alibi=alibi), atol=1e-5, rtol=1e-5)


def test_padding_rows_give_zeros_and_harm_nobody():
    rows = [(1, 0), (1, 9), (1, 0), (3, 3), (2, 0)]
    case = make_case(rows, 4, 2, 16, 16, seed=3)  # padding keys are NaN
    out = run(case, 4, 2, 16, 16)
    torch.testing.assert_close(out.double(), case.expected(0.25), atol=1e-5, rtol=1e-5)
    assert not out[[0, 2, 6, 7]].any()


def test_a_query_with_other_strides_gives_the_same():
    case = make_case(RAGGED, 6, 2, 16, 16, seed=4)
    plain = run(case, 6, 2, 16, 16)
    packed = torch.randn(len(case.query), 10, 16)  # as it lies in a fused q, k, v product
    packed[:, :6], packed[:, 6:8], packed[:, 8:] = case.query, case.key, case.value
    case.query, case.key, case.value = packed[:, :6], packed[:, 6:8], packed[:, 8:]
    assert torch.equal(run(case, 6, 2, 16, 16), plain)


@pytest.mark.parametrize("limit", [1, 5_000, 40_000])
def test_bounded_memory_cuts_rows_and_queries_without_changing_the_result(monkeypatch, limit):
    case = make_case([(1, 30), (1, 200), (1, 8), (40, 90), (40, 41)], 4, 2, 16, 16, seed=5)
    whole = run(case, 4, 2, 16, 16)
    monkeypatch.setattr(op, "_MAX_ELEMENTS", limit)
    torch.testing.assert_close(run(case, 4, 2, 16, 16), whole, atol=1e-6, rtol=1e-6)


def test_spans_join_neighbours_of_one_query_length_only():
    spans = op.plan_spans([1, 1, 0, 1, 4, 4, 1], [9, 12, 3, 5, 4, 8, 2], elements_per_key=32)
    assert [(s.first_row, s.num_rows, s.first_token, s.query_len, s.max_context_len) for s in spans] == [
        (0, 2, 0, 1, 12),
        (3, 1, 2, 1, 5),
        (4, 2, 3, 4, 8),
        (6, 1, 11, 1, 2),
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_caches(dtype):
    case = make_case(RAGGED, 9, 3, 64, 16, dtype=dtype, seed=6)
    out = run(case, 9, 3, 64, 16)
    assert out.dtype == dtype
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(out.double(), case.expected(0.125), atol=tolerance, rtol=tolerance)


def test_the_cache_is_written_and_its_bytes_are_counted():
    backend = TorchBackend("torch", 8)
    cache = backend.make_cache(5, 3, 2, 16, torch.bfloat16, torch.device("cpu"))
    assert cache.num_bytes == 5 * backend.bytes_per_block(3, 2, 16, torch.bfloat16) == 5 * 3 * 2 * 2 * 8 * 16 * 2
    assert (len(cache.keys), len(cache.values), cache.num_blocks, cache.block_size) == (3, 3, 5, 8)
    assert not any(layer.any() for layer in (*cache.keys, *cache.values))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_it_gives_the_same_and_never_waits(dtype):
    case = make_case([*RAGGED, (1, 0)], 9, 3, 64, 16, dtype=dtype, seed=8)
    expected = run(case, 9, 3, 64, 16, window=50)
    device = torch.device("cuda")
    backend = TorchBackend("paged", 16)
    cache = backend.make_cache(case.num_blocks, 1, 3, 64, dtype, device)
    case.fill(lambda k, v, slots: kv_write(cache.keys[0], cache.values[0], k.cuda(), v.cuda(), slots.cuda()), 16)
    columns = ("cu_seqlens_q", "context_lens_device", "block_tables", "slots")
    inputs = replace(case.inputs, **{name: getattr(case.inputs, name).to(device) for name in columns})
    query, key, value = case.query.to(device), case.key.to(device), case.value.to(device)
    for mode in ("default", "error"):  # the first round may load kernels
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            out = backend.plan(inputs, cache, 9)(0, query, key, value, 0.125, window=50)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.cpu(), expected, atol=tolerance, rtol=tolerance)
