"""Every kernel of a platform's table against its op's torch reference."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from tgi.server.kernels.cpu.linear import BlockedLinear
from tgi.server.kernels.cpu.matmul import PanelLinear
from tgi.server.ops import activation, matmul, norm, rotary
from tgi.server.ops.dispatch import Ops, bind
from tgi.server.platforms import cpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# One row, a ragged tail of the vector width, more rows than a thread takes alone.
SHAPES = [(1, 64), (3, 576), (7, 37), (200, 576)]
# The last place of each dtype, relative: kernels round once where the reference does, sums may differ before.
LAST_PLACE = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(scope="module")
def ops() -> Ops:
    return bind(cpu.KERNELS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(ops: Ops, shape: tuple[int, int], dtype: torch.dtype) -> None:
    inputs, weight = random(*shape, dtype=dtype), 1 + random(shape[1], dtype=dtype, seed=1)
    before = inputs.clone()
    normed = ops.rms_norm(inputs, weight, 1e-5)
    torch.testing.assert_close(normed, norm.rms_norm(inputs, weight, 1e-5), rtol=LAST_PLACE[dtype], atol=1e-6)
    assert normed.dtype == dtype
    assert torch.equal(inputs, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm_changes_the_residual_in_place(ops: Ops, shape: tuple[int, int], dtype: torch.dtype) -> None:
    inputs, weight = random(*shape, dtype=dtype), 1 + random(shape[1], dtype=dtype, seed=1)
    residual = random(*shape, seed=2)  # float32 whatever the weights are
    expected_residual = residual.clone()
    expected = norm.add_rms_norm(inputs, expected_residual, weight, 1e-5)
    before = inputs.clone()
    normed = ops.add_rms_norm(inputs, residual, weight, 1e-5)
    torch.testing.assert_close(normed, expected, rtol=LAST_PLACE[dtype], atol=1e-6)
    assert torch.equal(residual, expected_residual)
    assert torch.equal(inputs, before)
    assert normed.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_first_norm_reads_the_float32_stream(ops: Ops, shape: tuple[int, int], dtype: torch.dtype) -> None:
    stream, weight = random(*shape), 1 + random(shape[1], dtype=dtype, seed=1)
    normed = ops.rms_norm(stream, weight, 1e-5)
    torch.testing.assert_close(normed, norm.rms_norm(stream, weight, 1e-5), rtol=LAST_PLACE[dtype], atol=1e-6)
    assert normed.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_offset_is_added_to_the_weight_in_float32(ops: Ops, dtype: torch.dtype) -> None:
    inputs, weight = random(7, 37, dtype=dtype), random(37, dtype=dtype, seed=1) * 0.01  # one plus it would be rounded
    residual = random(7, 37, seed=2)
    expected = norm.rms_norm(inputs, weight, 1e-5, 1.0)
    torch.testing.assert_close(ops.rms_norm(inputs, weight, 1e-5, 1.0), expected, rtol=LAST_PLACE[dtype], atol=1e-6)
    expected = norm.add_rms_norm(inputs, residual.clone(), weight, 1e-5, 1.0)
    normed = ops.add_rms_norm(inputs, residual.clone(), weight, 1e-5, 1.0)
    torch.testing.assert_close(normed, expected, rtol=LAST_PLACE[dtype], atol=1e-6)
    plain = ops.rms_norm(inputs, weight, 1e-5, 0.0)
    torch.testing.assert_close(plain, norm.rms_norm(inputs, weight, 1e-5), rtol=LAST_PLACE[dtype], atol=1e-6)


def test_layer_norm_with_and_without_weight_and_bias() -> None:
    inputs, weight, bias = random(5, 37, dtype=torch.bfloat16), random(37, seed=1), random(37, seed=2)
    values = inputs.double()
    centred = values - values.mean(-1, keepdim=True)
    plain = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    for w, b in ((weight, bias), (weight, None), (None, None)):
        expected = plain * (1.0 if w is None else w.double()) + (0.0 if b is None else b.double())
        normed = norm.layer_norm(inputs, w, b, 1e-3, torch.float32)
        torch.testing.assert_close(normed.double(), expected, rtol=1e-5, atol=1e-5)
    assert norm.layer_norm(inputs, weight, bias, 1e-3, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotated", [8, 16])
def test_interleaved_pairs_are_rotated_like_halves_of_a_sorted_head(ops: Ops, rotated: int, dtype: torch.dtype) -> None:
    heads = random(5, 3, 16, dtype=dtype)
    angles = random(5, rotated // 2, seed=1)
    order = [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, 16)]  # the first of each pair, the second
    expected = heads.clone()
    expected[..., order] = rotary.rotate_(heads[..., order].clone(), angles.cos(), angles.sin())
    reference = rotary.rotate_(heads.clone(), angles.cos(), angles.sin(), True)
    assert torch.equal(reference, expected)
    turned = ops.rotate_(heads.clone(), angles.cos(), angles.sin(), True)
    torch.testing.assert_close(turned, reference, rtol=LAST_PLACE[dtype], atol=1e-6)


def test_the_references_formula() -> None:
    inputs = torch.tensor([[3.0, 4.0]])
    scale = 1 / math.sqrt((9 + 16) / 2 + 0.5)
    expected = torch.tensor([[3 * scale * 2, 4 * scale * 3]])
    torch.testing.assert_close(norm.rms_norm(inputs, torch.tensor([2.0, 3.0]), 0.5), expected)


def test_norm_reads_strided_inputs(ops: Ops) -> None:
    wide, weight = random(5, 128), random(64, seed=1)
    torch.testing.assert_close(ops.rms_norm(wide[:, 64:], weight, 1e-5), norm.rms_norm(wide[:, 64:], weight, 1e-5))


def test_eps_is_not_shared_between_norms(ops: Ops) -> None:
    inputs, weight = random(2, 64) * 1e-3, torch.ones(64)
    for eps in (1e-5, 1e-2, 1e-5):
        torch.testing.assert_close(ops.rms_norm(inputs, weight, eps), norm.rms_norm(inputs, weight, eps))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_spoils_no_other(ops: Ops, dtype: torch.dtype, bad: float) -> None:
    inputs, weight = random(3, 64, dtype=dtype), torch.ones(64, dtype=dtype)
    clean = ops.rms_norm(inputs, weight, 1e-5)
    inputs[1, 5] = bad
    normed = ops.rms_norm(inputs, weight, 1e-5)
    assert normed[1, 5].isnan()
    assert torch.equal(normed[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_do_not_depend_on_the_batch(ops: Ops, dtype: torch.dtype) -> None:
    inputs, weight = random(200, 576, dtype=dtype), random(576, dtype=dtype, seed=1)
    together = ops.rms_norm(inputs, weight, 1e-5)
    assert torch.equal(ops.rms_norm(inputs[17:18], weight, 1e-5), together[17:18])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "head_dim", "rotated"), [(1, 12, 64, 64), (5, 3, 16, 16), (70, 9, 80, 32)])
def test_rotate(ops: Ops, tokens: int, heads: int, head_dim: int, rotated: int, dtype: torch.dtype) -> None:
    # As in a fused projection: the heads that turn are a slice, the ones behind stay.
    fused = random(tokens, heads + 2, head_dim, dtype=dtype)
    angles = random(tokens, rotated // 2, seed=1) * 100
    expected = fused.clone()
    rotary.rotate_(expected[:, :heads], angles.cos(), angles.sin())
    before = fused.clone()
    result = ops.rotate_(fused[:, :heads], angles.cos(), angles.sin())
    assert result.data_ptr() == fused.data_ptr()
    torch.testing.assert_close(fused, expected, rtol=LAST_PLACE[dtype], atol=1e-5)
    assert torch.equal(fused[:, heads:], before[:, heads:])
    assert torch.equal(fused[..., rotated:], before[..., rotated:])
    assert not torch.equal(fused, before)


def test_the_references_rotation_is_one() -> None:
    heads = random(4, 2, 8)
    angles = random(4, 4, seed=1)
    turned = rotary.rotate_(heads.clone(), angles.cos(), angles.sin())
    pairs = torch.complex(heads[..., :4], heads[..., 4:]) * torch.polar(torch.ones(4, 4), angles).unsqueeze(1)
    torch.testing.assert_close(turned, torch.cat((pairs.real, pairs.imag), -1))


ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.02}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 12, 13, 39])  # up to a tile of rows, past it, and several
@pytest.mark.parametrize("shape", [(96, 64), (70, 37), (5, 128)])  # whole panels, a ragged last one, less than one
@pytest.mark.parametrize("kind", [BlockedLinear, PanelLinear])
def test_linear(
    kind: Callable[..., matmul.LinearKernel], shape: tuple[int, int], rows: int, dtype: torch.dtype
) -> None:
    weight, inputs = random(*shape, dtype=dtype), random(rows, shape[1], dtype=dtype, seed=1)
    bias = random(shape[0], dtype=dtype, seed=2)
    for a_bias in (None, bias):
        expected = matmul.linear(weight.float(), None if a_bias is None else a_bias.float())(inputs.float())
        outputs = kind(weight.clone(), a_bias)(inputs)
        assert outputs.dtype == dtype
        assert outputs.is_contiguous()
        torch.testing.assert_close(outputs.float(), expected, rtol=LAST_PLACE[dtype], atol=ROUNDING[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_float_outputs_are_not_rounded_on_the_way(dtype: torch.dtype) -> None:
    weight, inputs = random(96, 64, dtype=dtype), random(3, 64, dtype=dtype, seed=1)
    outputs = PanelLinear(weight, None, float_out=True)(inputs)
    assert outputs.dtype == torch.float32
    torch.testing.assert_close(outputs, inputs.float() @ weight.float().T, rtol=1e-5, atol=1e-5)
    for kind in (BlockedLinear, matmul.linear):
        assert kind(weight, None, float_out=True)(inputs).dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_products_row_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    product = PanelLinear(random(192, 320, dtype=dtype), random(192, dtype=dtype, seed=2))
    inputs = random(100, 320, dtype=dtype, seed=1)
    together = product(inputs)
    for rows in (slice(17, 18), slice(3, 14), slice(88, 100)):
        assert torch.equal(product(inputs[rows]), together[rows])


def test_a_product_takes_strided_inputs_of_any_rank() -> None:
    weight, wide = random(96, 64), random(2, 3, 128, seed=1)
    outputs = PanelLinear(weight, None)(wide[..., 64:])
    torch.testing.assert_close(outputs, wide[..., 64:] @ weight.T, rtol=1e-5, atol=1e-5)
    assert PanelLinear(weight, None)(wide[0, :0, 64:]).shape == (0, 96)


def test_a_row_that_is_not_finite_spoils_no_other_product() -> None:
    product, inputs = PanelLinear(random(96, 64), None), random(3, 64, seed=1)
    clean = product(inputs)
    inputs[1, 5] = math.nan
    assert product(inputs)[1].isnan().all()
    assert torch.equal(product(inputs)[[0, 2]], clean[[0, 2]])


def test_what_a_product_keeps_is_all_that_is_counted(ops: Ops) -> None:
    kernel = ops.linear(random(96, 64), random(96, seed=1), False)
    assert sum(tensor.numel() for tensor in kernel.kept) == 96 * 64 + 96


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu"])
def test_activations_gate_the_second_half_by_the_first(name: str) -> None:
    gate, up = random(3, 8), random(3, 8, seed=1)
    function = {
        "silu": lambda x: x / (1 + (-x).exp()),
        "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
        "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
        "relu": lambda x: x.clamp(min=0),
    }[name]
    result = getattr(activation, f"{name}_and_mul")(torch.cat((gate, up), -1))
    torch.testing.assert_close(result, function(gate) * up)


def test_clamped_swiglu_takes_gates_and_what_they_gate_in_turn() -> None:
    gate, up = torch.tensor([-9.0, 0.5, 9.0, 2.0]), torch.tensor([1.0, -9.0, 0.5, 9.0])
    result = activation.clamped_swiglu(torch.stack((gate, up), -1).flatten(), 1.7, 3.0)
    gates, ups = torch.tensor([-9.0, 0.5, 3.0, 2.0]), torch.tensor([1.0, -3.0, 0.5, 3.0])  # a gate has no lower bound
    torch.testing.assert_close(result, gates / (1 + (-1.7 * gates).exp()) * (ups + 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_activations_row_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    gate_up = random(50, 2 * 1000, dtype=dtype)
    together = activation.silu_and_mul(gate_up)
    assert torch.equal(activation.silu_and_mul(gate_up[17:18]), together[17:18])


def test_a_table_with_a_word_that_is_no_op_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="no such op: sofmax"):
        bind({"sofmax": "math:exp"})
