"""Norm and rotation on a CPU: one pass over memory and one call each, where torch takes ten. At small batches the calls
are the cost. (Gated activations gain nothing: torch's two calls are as quick.)

A row's arithmetic depends on nothing but that row: it has the same bits in every batch and on any number of threads.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from numba import carray, njit  # pyright: ignore[reportPrivateImportUsage]

from tgi.server.kernels.cpu.elements import ELEMENTS, KIND_OF
from tgi.server.kernels.cpu.parallel import FIRST_ARGUMENT, NEXT_ITEM, NUM_ITEMS, atomic_add, run, worker
from tgi.server.kernels.cpu.vector import BFLOAT16, FLOAT16, FLOAT32, load_int64

# Elements below which waking a second thread costs more than it saves.
_ALONE_BELOW = 32_768
# Sums may be split over vector lanes and fused with products: the same way for every row of one length.
_FAST = {"reassoc", "contract"}
_ZERO, _ONE = np.float32(0), np.float32(1)

_float_pointer = ELEMENTS[FLOAT32].pointer

# Words of the workers' arguments; addresses in bytes, strides in elements.
KIND = FIRST_ARGUMENT
INPUTS, RESIDUAL, WEIGHT, OUT, SIZE, EPS, WIDE_INPUTS, OFFSET = range(KIND + 1, KIND + 9)  # norm; RESIDUAL 0: none;
# EPS, OFFSET: float32 bits; WIDE_INPUTS: they are float32 though the weight is not
HEADS, TOKEN_STRIDE, HEAD_STRIDE, NUM_HEADS, COS, SIN, HALF, INTERLEAVED = range(KIND + 1, KIND + 9)  # rotation
NUM_ARGUMENTS = KIND + 9
_NORM_CALL = struct.Struct("<6q")  # words KIND to SIZE: quicker than a slice of them
_ROTATE_CALL = struct.Struct("<9q")  # words KIND to INTERLEAVED


def rms_norm(inputs: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """As `ops.norm.rms_norm`."""
    return _run_norm(inputs, None, weight, eps, offset)


def add_rms_norm(
    inputs: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> torch.Tensor:
    """As `ops.norm.add_rms_norm`."""
    assert residual.is_contiguous(), "the residual stream is changed in place"
    assert residual.dtype == torch.float32, "the residual stream is float32"
    return _run_norm(inputs, residual, weight, eps, offset)


def rotate_(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """As `ops.rotary.rotate_`."""
    tokens, num_heads, _ = heads.shape
    assert heads.stride(2) == 1, "a head's elements lie side by side"
    cos, sin = cos.contiguous(), sin.contiguous()
    words, address = _rotate_arguments()
    words[NEXT_ITEM] = 0
    words[NUM_ITEMS] = tokens
    _ROTATE_CALL.pack_into(
        words.data, 8 * KIND, KIND_OF[heads.dtype], heads.data_ptr(), heads.stride(0), heads.stride(1), num_heads,
        cos.data_ptr(), sin.data_ptr(), cos.shape[1], interleaved,
    )  # fmt: skip
    run(rotate_worker(), address, heads.numel() < _ALONE_BELOW)
    return heads


def _run_norm(
    inputs: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, offset: float
) -> torch.Tensor:
    inputs = inputs.contiguous()
    out = torch.empty(inputs.shape, dtype=weight.dtype)
    size = inputs.shape[-1]
    words, address = _norm_arguments(eps, offset)
    words[NEXT_ITEM] = 0
    words[NUM_ITEMS] = inputs.numel() // size
    _NORM_CALL.pack_into(
        words.data, 8 * KIND, KIND_OF[weight.dtype], inputs.data_ptr(), 0 if residual is None else residual.data_ptr(),
        weight.data_ptr(), out.data_ptr(), size,
    )  # fmt: skip
    words[WIDE_INPUTS] = inputs.dtype == torch.float32
    run(norm_worker(), address, inputs.numel() < _ALONE_BELOW)
    return out


# One thread runs one step at a time: the arguments of a call may lie where the last call's did.
@cache
def _norm_arguments(eps: float, offset: float) -> tuple[np.ndarray, int]:
    words = np.zeros(NUM_ARGUMENTS, np.int64)
    words[EPS], words[OFFSET] = np.array([eps, offset], np.float32).view(np.int32)
    return words, words.ctypes.data


@cache
def _rotate_arguments() -> tuple[np.ndarray, int]:
    words = np.zeros(NUM_ARGUMENTS, np.int64)
    return words, words.ctypes.data


@njit(inline="always")
def _word(arguments, index):
    return load_int64(arguments + 8 * index)


def _norm_of(kind: int) -> Callable[[int], None]:
    pointer, width, widen, narrow = ELEMENTS[kind]

    @njit(fastmath=_FAST, error_model="numpy")
    def norm(arguments):
        size = _word(arguments, SIZE)
        eps = carray(_float_pointer(arguments + 8 * EPS), 1)[0]
        offset = carray(_float_pointer(arguments + 8 * OFFSET), 1)[0]
        has_residual = _word(arguments, RESIDUAL) != 0
        has_wide_inputs = _word(arguments, WIDE_INPUTS) != 0
        weight = carray(pointer(_word(arguments, WEIGHT)), size)
        while True:
            row = atomic_add(arguments + 8 * NEXT_ITEM, 1)
            if row >= _word(arguments, NUM_ITEMS):
                return
            first = row * size
            # Views only: which of the two is read depends on what was given.
            inputs = carray(pointer(_word(arguments, INPUTS) + first * width), size)
            wide = _word(arguments, RESIDUAL) if has_residual else _word(arguments, INPUTS)
            stream = carray(_float_pointer(wide + first * 4), size)
            out = carray(pointer(_word(arguments, OUT) + first * width), size)
            squares = _ZERO
            if has_residual:
                for i in range(size):
                    total = stream[i] + widen(inputs[i])
                    stream[i] = total
                    squares += total * total
            elif has_wide_inputs:
                for i in range(size):
                    squares += stream[i] * stream[i]
            else:
                for i in range(size):
                    squares += widen(inputs[i]) * widen(inputs[i])
            scale = _ONE / np.sqrt(squares / np.float32(size) + eps)
            if has_residual or has_wide_inputs:
                for i in range(size):
                    out[i] = narrow(stream[i] * scale * (widen(weight[i]) + offset))
            else:
                for i in range(size):
                    out[i] = narrow(widen(inputs[i]) * scale * (widen(weight[i]) + offset))

    return norm


def _rotate_of(kind: int) -> Callable[[int], None]:
    pointer, width, widen, narrow = ELEMENTS[kind]

    @njit(error_model="numpy")
    def rotate(arguments):
        half = _word(arguments, HALF)
        is_interleaved = _word(arguments, INTERLEAVED) != 0
        while True:
            token = atomic_add(arguments + 8 * NEXT_ITEM, 1)
            if token >= _word(arguments, NUM_ITEMS):
                return
            cos = carray(_float_pointer(_word(arguments, COS) + 4 * token * half), half)
            sin = carray(_float_pointer(_word(arguments, SIN) + 4 * token * half), half)
            head = _word(arguments, HEADS) + token * _word(arguments, TOKEN_STRIDE) * width
            for _ in range(_word(arguments, NUM_HEADS)):
                first = carray(pointer(head), half)
                second = carray(pointer(head + half * width), half)
                pairs = carray(pointer(head), 2 * half)
                if is_interleaved:
                    for i in range(half):
                        a, b = widen(pairs[2 * i]), widen(pairs[2 * i + 1])
                        pairs[2 * i] = narrow(a * cos[i] - b * sin[i])
                        pairs[2 * i + 1] = narrow(b * cos[i] + a * sin[i])
                else:
                    for i in range(half):
                        a, b = widen(first[i]), widen(second[i])
                        first[i] = narrow(a * cos[i] - b * sin[i])
                        second[i] = narrow(b * cos[i] + a * sin[i])
                head += _word(arguments, HEAD_STRIDE) * width

    return rotate


_norm_float32, _norm_bfloat16, _norm_float16 = (_norm_of(kind) for kind in (FLOAT32, BFLOAT16, FLOAT16))
_rotate_float32, _rotate_bfloat16, _rotate_float16 = (_rotate_of(kind) for kind in (FLOAT32, BFLOAT16, FLOAT16))


@worker
def norm_worker(arguments):
    kind = _word(arguments, KIND)
    if kind == FLOAT32:
        _norm_float32(arguments)
    elif kind == BFLOAT16:
        _norm_bfloat16(arguments)
    else:
        _norm_float16(arguments)


@worker
def rotate_worker(arguments):
    kind = _word(arguments, KIND)
    if kind == FLOAT32:
        _rotate_float32(arguments)
    elif kind == BFLOAT16:
        _rotate_bfloat16(arguments)
    else:
        _rotate_float16(arguments)
