"""Every block type against the reference reader, and the traps by hand."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from tgi.server.weights.gguf_blocks import BLOCKS, block_type, dequantize

# Where a block's float16 numbers lie, if not in its first two bytes.
SCALE_BYTES = {name: slice(0, 4) for name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")} | {
    "Q2_K": slice(80, 84),
    "Q3_K": slice(108, 110),
    "Q6_K": slice(208, 210),
    "MXFP4": slice(0, 0),
}
QUANTISED = [kind for kind, blocks in BLOCKS.items() if blocks.elements > 1]


def test_the_supported_types_are_those_promised() -> None:
    names = {blocks.name for blocks in BLOCKS.values()}
    legacy = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
    assert names == {
        "F32",
        "F16",
        "BF16",
        *legacy,
        *(f"Q{bits}_K" for bits in range(2, 7)),
        "IQ4_NL",
        "IQ4_XS",
        "MXFP4",
    }


@pytest.mark.parametrize("kind", BLOCKS)
def test_sizes_are_the_formats(kind: int) -> None:
    elements, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    assert (BLOCKS[kind].elements, BLOCKS[kind].bytes) == (elements, num_bytes)
    assert gguf.GGMLQuantizationType(kind).name == BLOCKS[kind].name


@pytest.mark.parametrize("kind", QUANTISED)
def test_any_bytes_decode_as_the_reference_decodes_them(kind: int) -> None:
    blocks = BLOCKS[kind]
    raw = np.random.default_rng(kind).integers(0, 256, (257, blocks.bytes), dtype=np.uint8)
    # A random float16 scale is often infinite or not a number: put proper ones where the type has them.
    scales = np.random.default_rng(1).standard_normal((257, 2)).astype(np.float16).view(np.uint8)
    where = SCALE_BYTES.get(blocks.name, slice(0, 2))
    raw[:, where] = scales[:, : where.stop - where.start]
    if blocks.name == "MXFP4":
        raw[:, 0] = np.arange(257) % 250  # the largest exponents are beyond float32
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType(kind))
    decoded = dequantize(blocks, torch.from_numpy(raw))
    assert decoded.shape == (257, blocks.elements)
    assert np.abs(expected).max() > 1  # not all zero
    np.testing.assert_array_equal(decoded.numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_types_keep_their_bits(dtype: torch.dtype) -> None:
    values = torch.randn(5, 1, generator=torch.Generator().manual_seed(0)).to(dtype)
    kind = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}[dtype]
    decoded = dequantize(BLOCKS[kind], values.view(torch.uint8))
    assert decoded.dtype == dtype
    assert torch.equal(decoded, values)


@pytest.mark.parametrize(
    "name", ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "NVFP4"]
)
def test_rarer_types_are_decoded_by_the_formats_package(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    blocks = block_type(kind)
    assert blocks is not None
    assert (blocks.name, (blocks.elements, blocks.bytes)) == (name, gguf.GGML_QUANT_SIZES[kind])
    raw = np.random.default_rng(kind).integers(0, 30, (7, blocks.bytes), dtype=np.uint8)
    decoded = dequantize(blocks, torch.from_numpy(raw))
    assert decoded.shape == (7, blocks.elements)
    np.testing.assert_array_equal(decoded.numpy(), gguf.dequantize(raw, kind))


@pytest.mark.parametrize("kind", [4, 9, 15, 24, 99, 2**32 - 1])
def test_what_nobody_decodes_has_no_type(kind: int) -> None:
    assert block_type(kind) is None


def test_low_nibbles_are_the_first_half_of_a_block() -> None:
    # Scale 1, minimum 0.5; byte i holds i in its low nibble and 15 - i in its high one.
    header = np.array([1.0, 0.5], dtype=np.float16).view(np.uint8)
    quants = np.array([i | (15 - i) << 4 for i in range(16)], dtype=np.uint8)
    (values,) = dequantize(BLOCKS[3], torch.from_numpy(np.concatenate([header, quants]))[None])
    assert values.tolist() == [i + 0.5 for i in range(16)] + [15 - i + 0.5 for i in range(16)]
