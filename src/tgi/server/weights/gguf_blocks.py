"""Block types of GGUF and how their bytes become numbers. Knows no file and no names.

The common types are decoded here, the rarer ones by the format's own package. Layouts: block_q* in
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. In the 4- and 5-bit types the low nibbles of the quants
are a block's first half and the high nibbles its second, not neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class BlockType:
    name: str
    elements: int  # of one block
    bytes: int  # of one block
    decode: Callable[[torch.Tensor], torch.Tensor]  # [blocks, bytes] uint8 -> [blocks, elements]


@cache
def block_type(kind: int) -> BlockType | None:
    """The block type of that number; None when nothing here can decode it."""
    return BLOCKS.get(kind) or _of_package(kind)


def dequantize(blocks: BlockType, raw: torch.Tensor) -> torch.Tensor:
    """[blocks, bytes] uint8, contiguous -> [blocks, elements]: float32, or the type's own for F16 and BF16."""
    return blocks.decode(raw)


def _of_package(kind: int) -> BlockType | None:
    import gguf  # here: a tenth of a second that few files need

    try:
        named = gguf.GGMLQuantizationType(kind)
        elements, num_bytes = gguf.GGML_QUANT_SIZES[named]
        gguf.dequantize(np.zeros((1, num_bytes), np.uint8), named)
    except (ValueError, KeyError, NotImplementedError):
        return None

    def decode(raw: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(gguf.dequantize(raw.numpy(), named))

    return BlockType(named.name, elements, num_bytes, decode)


def _plain(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda raw: raw.view(dtype)


def _halves(raw: torch.Tensor) -> torch.Tensor:
    """[n, 2k] bytes -> [n, k] float32 from float16."""
    return raw.contiguous().view(torch.float16).float()


def _nibbles(quants: torch.Tensor) -> torch.Tensor:
    """[n, k] bytes -> [n, 2, k]: the low nibbles, then the high ones."""
    return torch.stack((quants & 15, quants >> 4), dim=1)


def _fifth_bits(high: torch.Tensor) -> torch.Tensor:
    """[n, 4] bytes, bit i of the 32 is element i's -> [n, 2, 16], each 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8, device=high.device)
    return (((high.unsqueeze(-1) >> shifts) & 1) << 4).view(-1, 2, 16)


def _q4_0(raw: torch.Tensor) -> torch.Tensor:
    return (_nibbles(raw[:, 2:]).view(-1, 32).float() - 8) * _halves(raw[:, :2])


def _q4_1(raw: torch.Tensor) -> torch.Tensor:
    scale, least = _halves(raw[:, :4]).split(1, dim=1)
    return _nibbles(raw[:, 4:]).view(-1, 32).float().mul_(scale).add_(least)


def _q5_0(raw: torch.Tensor) -> torch.Tensor:
    quants = _nibbles(raw[:, 6:]) | _fifth_bits(raw[:, 2:6])
    return (quants.view(-1, 32).float() - 16) * _halves(raw[:, :2])


def _q5_1(raw: torch.Tensor) -> torch.Tensor:
    scale, least = _halves(raw[:, :4]).split(1, dim=1)
    quants = _nibbles(raw[:, 8:]) | _fifth_bits(raw[:, 4:8])
    return quants.view(-1, 32).float().mul_(scale).add_(least)


def _q8_0(raw: torch.Tensor) -> torch.Tensor:
    return raw[:, 2:].view(torch.int8).float().mul_(_halves(raw[:, :2]))


def _k_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, 12] bytes -> scales and minima of the eight groups, [n, 8] each.

    Bytes 0-3 and 4-7 hold the first four of either in their low six bits; bytes 8-11 the last four's low nibbles, whose
    upper two bits lie on top of bytes 0-3 and 4-7.
    """
    first, second, third = packed.view(-1, 3, 4).unbind(1)
    scales = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), dim=1)
    return scales.float(), minima.float()


def _k_quants(raw: torch.Tensor, quants: torch.Tensor) -> torch.Tensor:
    """Header [n, 16] and quants [n, 8 groups, 32] -> [n, 256]."""
    scale, least = _halves(raw[:, :4]).split(1, dim=1)
    scales, minima = _k_scales(raw[:, 4:16].contiguous())
    values = quants.float().mul_((scale * scales).unsqueeze(-1)).sub_((least * minima).unsqueeze(-1))
    return values.view(-1, 256)


def _q4_k(raw: torch.Tensor) -> torch.Tensor:
    # 32 bytes hold two groups: low nibbles one, high nibbles the next.
    return _k_quants(raw, _nibbles(raw[:, 16:].reshape(-1, 32)).view(-1, 8, 32))


def _q5_k(raw: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device).view(1, 8, 1)
    fifth = ((raw[:, 16:48].unsqueeze(1) >> shifts) & 1) << 4  # bit g of byte i belongs to element i of group g
    return _k_quants(raw, _nibbles(raw[:, 48:].reshape(-1, 32)).view(-1, 8, 32) | fifth)


def _q6_k(raw: torch.Tensor) -> torch.Tensor:
    # Each half of 128 elements: 64 bytes of low nibbles and 32 bytes of upper bits, two per element.
    low = _nibbles(raw[:, :128].reshape(-1, 64)).view(-1, 2, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device).view(1, 1, 4, 1)
    high = ((raw[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3) << 4
    quants = (low | high).float().sub_(32).view(-1, 16, 16)
    scales = raw[:, 192:208].contiguous().view(torch.int8).float() * _halves(raw[:, 208:])
    return quants.mul_(scales.unsqueeze(-1)).view(-1, 256)


def _q2_k(raw: torch.Tensor) -> torch.Tensor:
    # A byte for each group of 16: scale in its low nibble, minimum in its high one.
    scale, least = _halves(raw[:, 80:]).split(1, dim=1)
    scales, minima = (raw[:, :16] & 15).float() * scale, (raw[:, :16] >> 4).float() * least
    quants = _pairs_of_bits(raw[:, 16:80]).view(-1, 16, 16).float()
    return quants.mul_(scales.unsqueeze(-1)).sub_(minima.unsqueeze(-1)).view(-1, 256)


def _q3_k(raw: torch.Tensor) -> torch.Tensor:
    # The third bits, inverted, lie first: bit g of byte i belongs to element i of group g of 32.
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device).view(1, 8, 1)
    third = ((~raw[:, :32].unsqueeze(1) >> shifts) & 1) << 2
    quants = _pairs_of_bits(raw[:, 32:96]).view(-1, 8, 32).to(torch.int8) - third.to(torch.int8)
    # Sixteen scales of six bits: nibbles of eight bytes, then four bytes with two more bits for each.
    high_shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device).view(1, 4, 1)
    high = ((raw[:, 104:108].unsqueeze(1) >> high_shifts) & 3) << 4
    scales = (_nibbles(raw[:, 96:104]).view(-1, 16) | high.view(-1, 16)).float().sub_(32) * _halves(raw[:, 108:])
    return quants.view(-1, 16, 16).float().mul_(scales.unsqueeze(-1)).view(-1, 256)


def _pairs_of_bits(raw: torch.Tensor) -> torch.Tensor:
    """[n, 64] bytes -> [n, 2, 4, 32]: of each half the lowest two bits of all its bytes, then the next."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device).view(1, 1, 4, 1)
    return (raw.reshape(-1, 2, 1, 32) >> shifts) & 3


def _table(numbers: tuple[int, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    """[n, k] bytes -> [n, 2, k] float32: the number that each nibble stands for, low nibbles first."""
    table = torch.tensor(numbers, dtype=torch.float32)
    return lambda raw: table.to(raw.device)[_nibbles(raw).int()]


_FP4 = _table((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))  # twice E2M1's numbers
_IQ4 = _table((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))


def _mxfp4(raw: torch.Tensor) -> torch.Tensor:
    # The first byte is a power of two, as a float32's exponent; half of it, since the table has twice the numbers.
    exponent = raw[:, :1].int()
    scale = torch.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23).view(torch.float32)
    return _FP4(raw[:, 1:]).view(-1, 32).mul_(scale)


def _iq4_nl(raw: torch.Tensor) -> torch.Tensor:
    return _IQ4(raw[:, 2:]).view(-1, 32).mul_(_halves(raw[:, :2]))


def _iq4_xs(raw: torch.Tensor) -> torch.Tensor:
    # Scales of the eight groups: low nibbles in four bytes, two more bits each in a little-endian word before them.
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device)
    high = ((raw[:, 2:4].unsqueeze(-1) >> shifts) & 3).view(-1, 8) << 4
    low = torch.stack((raw[:, 4:8] & 15, raw[:, 4:8] >> 4), dim=2).view(-1, 8)
    scales = (low | high).float().sub_(32) * _halves(raw[:, :2])
    return _IQ4(raw[:, 8:].reshape(-1, 16)).view(-1, 8, 32).mul_(scales.unsqueeze(-1)).view(-1, 256)


BLOCKS: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4, _plain(torch.float32)),
    1: BlockType("F16", 1, 2, _plain(torch.float16)),
    2: BlockType("Q4_0", 32, 18, _q4_0),
    3: BlockType("Q4_1", 32, 20, _q4_1),
    6: BlockType("Q5_0", 32, 22, _q5_0),
    7: BlockType("Q5_1", 32, 24, _q5_1),
    8: BlockType("Q8_0", 32, 34, _q8_0),
    10: BlockType("Q2_K", 256, 84, _q2_k),
    11: BlockType("Q3_K", 256, 110, _q3_k),
    12: BlockType("Q4_K", 256, 144, _q4_k),
    13: BlockType("Q5_K", 256, 176, _q5_k),
    14: BlockType("Q6_K", 256, 210, _q6_k),
    20: BlockType("IQ4_NL", 32, 18, _iq4_nl),
    23: BlockType("IQ4_XS", 256, 136, _iq4_xs),
    30: BlockType("BF16", 1, 2, _plain(torch.bfloat16)),
    39: BlockType("MXFP4", 32, 17, _mxfp4),
}
