"""Experts as a GPU keeps them against the op's torch reference; torch computes either on a CPU too."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tgi.server.kernels.cuda import experts as cuda
from tgi.server.ops import moe
from tgi.server.ops.activation import silu_and_mul
from tgi.server.ops.matmul import linear
from tgi.server.ops.moe import Dense

HIDDEN, INNER, EXPERTS, TOP = 32, 24, 12, 3
Make = Callable[..., moe.ExpertsKernel]


def dense(shape: tuple[int, int], seed: int, bias: bool, dtype: torch.dtype) -> Iterator[Dense]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(EXPERTS):
        weight = torch.randn(shape, generator=generator) / shape[1] ** 0.5
        yield weight.to(dtype), torch.randn(shape[0], generator=generator).to(dtype) if bias else None


def made(make: Make, *, bias: bool, dtype: torch.dtype, device: str = "cpu") -> moe.ExpertsKernel:
    def stack(shape: tuple[int, int], seed: int) -> Iterator[Dense]:
        for weight, offset in dense(shape, seed, bias, dtype):
            yield weight.to(device), None if offset is None else offset.to(device)

    return make(EXPERTS, stack((2 * INNER, HIDDEN), 1), stack((HIDDEN, INNER), 2), silu_and_mul, linear)


def tokens_of(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden, ids, weights; the last expert is chosen by nobody."""
    generator = torch.Generator().manual_seed(count)
    hidden = torch.randn(count, HIDDEN, generator=generator).to(dtype)
    weights, ids = torch.rand(count, EXPERTS - 1, generator=generator).topk(TOP)
    return hidden, ids, weights


@pytest.fixture(params=["as measured", "copied", "every", "grouped"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that a kernel chooses from, where it has more than one."""
    if request.param != "as measured":
        monkeypatch.setattr(cuda, "COPY_COST", 0 if request.param == "copied" else 1_000_000)
        monkeypatch.setattr(cuda.StackedExperts, "_is_dense", lambda *_: request.param != "grouped")


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("make", [cuda.stacked_experts, cuda.grouped_experts])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("count", [1, 2, 40])
def test_mixes_as_the_reference(make: Make, bias: bool, count: int) -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 6e-2)):
        reference = made(moe.experts, bias=bias, dtype=dtype)
        kernel = made(make, bias=bias, dtype=dtype)
        assert isinstance(kernel, cuda.StackedExperts)
        assert kernel.is_grouped == (make is cuda.grouped_experts and dtype == torch.bfloat16)
        assert sum(map(torch.numel, kernel.kept)) == sum(map(torch.numel, reference.kept))
        tokens = tokens_of(count, dtype)
        torch.testing.assert_close(kernel(*tokens), reference(*tokens), rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("make", [cuda.stacked_experts, cuda.grouped_experts])
@pytest.mark.parametrize("count", [1, 40])
def test_what_nobody_chose_counts_for_nothing(make: Make, count: int) -> None:
    """Whatever it makes of the tokens: in float16 that may be more than there are numbers for."""
    kernel = made(make, bias=True, dtype=torch.bfloat16)
    tokens = tokens_of(count, torch.bfloat16)
    before = kernel(*tokens)
    for tensor in kernel.kept:
        tensor[EXPERTS - 1] = float("inf")
    assert torch.equal(kernel(*tokens), before)


def test_many_tokens_take_some_experts_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = made(cuda.stacked_experts, bias=True, dtype=torch.float32)
    tokens = tokens_of(40, torch.float32)
    at_once = kernel(*tokens)
    monkeypatch.setattr(cuda, "BYTES_AT_A_TIME", 5 * 40 * 2 * INNER * 4)
    torch.testing.assert_close(kernel(*tokens), at_once)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("make", [cuda.stacked_experts, cuda.grouped_experts])
@pytest.mark.parametrize("count", [1, 40])
def test_a_gpu_is_not_waited_for(make: Make, count: int) -> None:
    reference = made(moe.experts, bias=True, dtype=torch.bfloat16)
    kernel = made(make, bias=True, dtype=torch.bfloat16, device="cuda")
    tokens = tokens_of(count, torch.bfloat16)
    on_device = [tensor.cuda() for tensor in tokens]
    kernel(*on_device)
    try:
        torch.cuda.set_sync_debug_mode("error")
        mixed = kernel(*on_device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(mixed.cpu(), reference(*tokens), rtol=6e-2, atol=6e-2)


@pytest.mark.gpu
def test_a_gpu_does_not_round_what_a_router_says() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias, inputs = (torch.randn(shape, generator=generator).bfloat16() for shape in ((24, 64), (24,), (5, 64)))
    expected = torch.nn.functional.linear(inputs.float(), weight.float(), bias.float())
    found = linear(weight.cuda(), bias.cuda(), True)(inputs.cuda())
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
