"""Products with a weight, widened as it is read and summed in float32.

An output is one sum over the input features in order, whatever the number of rows: a row has the same bits in every
batch and on any number of threads. Small batches run as fast as the weight can be read.

The weight lies in panels of 32 output features, feature by feature of the input: [panels, in, 32], the last filled up
with zeros. A tile of up to 12 rows and one panel keeps its sums in registers.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir
from numba import carray, njit, types  # pyright: ignore[reportPrivateImportUsage]
from numba.core import cgutils
from numba.extending import intrinsic

from tgi.server.kernels.cpu.elements import ELEMENTS, KIND_OF
from tgi.server.kernels.cpu.parallel import (
    FIRST_ARGUMENT,
    NEXT_ITEM,
    NEXT_THREAD,
    NUM_ITEMS,
    atomic_add,
    max_threads,
    run,
    worker,
)
from tgi.server.kernels.cpu.vector import BFLOAT16, FLOAT16, FLOAT32, load_int64

PANEL = 32
LANES = 16
VECTORS = PANEL // LANES
# 24 vectors of sums, 2 of weights and one of inputs fit 32 registers; without AVX-512 a vector takes two of 16.
MAX_ROWS = 12 if binding.get_host_cpu_features().get("avx512f") else 2
# The weight's way from memory is what counts below some 30 rows: its lines are asked for so far ahead, across the
# borders of pages where the hardware stops. One core, 30 layers of SmolLM2-135M in bfloat16, 1 and 12 rows: without
# 28 and 43 ms, with 2 KiB 20.5 ms, 4 KiB 20.4 and 27 ms, 8 KiB 22 and 28 ms.
_PREFETCH_BYTES = 4096
_PANELS_AT_ONCE = 16  # that a thread fills
# Multiply-adds below which waking a second thread costs more than it saves.
_ALONE_BELOW = 60_000

# Words of the worker's arguments; addresses in bytes.
(
    KIND,  # of weight and, unless OUT_FLOAT, of the output
    INPUTS,  # [rows, in] float32
    WEIGHT,
    BIAS,  # [out] float32; 0: none
    OUT,  # [rows, out]
    OUT_FLOAT,  # 1: the output is float32
    NUM_ROWS,
    SIZE_IN,
    SIZE_OUT,
    SCRATCH,  # [threads, MAX_ROWS, PANEL] float32
) = range(FIRST_ARGUMENT, FIRST_ARGUMENT + 10)
NUM_ARGUMENTS = FIRST_ARGUMENT + 10


class PanelLinear:
    """As `ops.matmul.linear`. One thread at a time may call it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, float_out: bool = False) -> None:
        size_out, size_in = weight.shape
        self._size_out, self._size_in = size_out, size_in
        self._weight = _panels(weight)
        self._bias = None if bias is None else bias.float()
        self._dtype = torch.float32 if float_out else weight.dtype
        self.kept = (self._weight,) if self._bias is None else (self._weight, self._bias)
        words = self._words = np.zeros(NUM_ARGUMENTS, np.int64)
        words[NUM_ITEMS] = self._weight.shape[0]
        words[KIND] = KIND_OF[weight.dtype]
        words[WEIGHT] = self._weight.data_ptr()
        words[BIAS] = 0 if self._bias is None else self._bias.data_ptr()
        words[OUT_FLOAT] = float_out
        words[SIZE_IN], words[SIZE_OUT] = size_in, size_out
        self._address = words.ctypes.data

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        wide = inputs.float().contiguous()
        rows = wide.numel() // self._size_in
        out = torch.empty((*inputs.shape[:-1], self._size_out), dtype=self._dtype)
        words = self._words
        words[NEXT_ITEM] = words[NEXT_THREAD] = 0
        words[INPUTS] = wide.data_ptr()
        words[OUT] = out.data_ptr()
        words[NUM_ROWS] = rows
        words[SCRATCH] = _scratch(max_threads()).data_ptr()
        run(matmul_worker(), self._address, rows * self._size_in * self._size_out < _ALONE_BELOW)
        return out


def _panels(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] -> [panels, in, PANEL]"""
    size_out, size_in = weight.shape
    panels = weight.new_empty(-(-size_out // PANEL), size_in, PANEL)
    full = size_out // PANEL

    @torch.inference_mode(torch.is_inference_mode_enabled())  # each thread has its own mode
    def fill(first: int) -> None:
        # One by one: torch transposes a matrix block by block, what has more dimensions element by element.
        for panel in range(first, min(first + _PANELS_AT_ONCE, full)):
            panels[panel].copy_(weight[panel * PANEL : (panel + 1) * PANEL].T)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for _ in pool.map(fill, range(0, full, _PANELS_AT_ONCE)):
            pass
    if full < len(panels):
        rest = size_out - full * PANEL
        panels[full, :, :rest] = weight[full * PANEL :].T
        panels[full, :, rest:] = 0
    return panels


@cache
def _scratch(threads: int) -> torch.Tensor:
    return torch.zeros(threads, MAX_ROWS, PANEL)


_I64, _F32 = ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_F32, LANES)


def _load(builder: Any, address: Any, type_: ir.Type, align: int) -> Any:
    value = builder.load(builder.inttoptr(address, type_.as_pointer()), typ=type_)
    value.align = align
    return value


def _load_panel(builder: Any, address: Any, kind: int) -> Any:
    """LANES weights as float32."""
    if kind == FLOAT32:
        return _load(builder, address, _VECTOR, 4)
    if kind == FLOAT16:
        return builder.fpext(_load(builder, address, ir.VectorType(ir.HalfType(), LANES), 2), _VECTOR)
    words = ir.VectorType(ir.IntType(32), LANES)
    bits = builder.zext(_load(builder, address, ir.VectorType(ir.IntType(16), LANES), 2), words)
    return builder.bitcast(builder.shl(bits, ir.Constant(words, [16] * LANES)), _VECTOR)


def _prefetch(builder: Any, address: Any, num_bytes: int) -> None:
    """Ask for the cache lines of so many bytes. An address behind the end of memory does no harm."""
    flag = ir.IntType(32)
    pointer = ir.IntType(8).as_pointer()
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag]), "llvm.prefetch.p0i8"
    )
    for line in range(0, num_bytes, 64):
        place = builder.inttoptr(builder.add(address, ir.Constant(_I64, line)), pointer)
        builder.call(function, [place, ir.Constant(flag, 0), ir.Constant(flag, 3), ir.Constant(flag, 1)])


def _tile_of(kind: int) -> Any:
    width = ELEMENTS[kind].width

    @intrinsic
    def tile(typingctx, rows, inputs, size_in, panel, out):
        """out[rows, PANEL] = inputs[rows, size_in] @ panel[size_in, PANEL]; rows 1 to MAX_ROWS, size_in ≥ 1."""
        del typingctx, rows, inputs, size_in, panel, out

        def emit(context, builder, signature, arguments):
            del signature
            rows, inputs, size_in, panel, out = arguments
            done = builder.append_basic_block("tile.done")
            choose = builder.switch(rows, done)
            for num_rows in range(1, MAX_ROWS + 1):
                block = builder.append_basic_block("tile")
                choose.add_case(ir.Constant(_I64, num_rows), block)
                builder.position_at_end(block)
                _emit_tile(builder, kind, width, num_rows, inputs, size_in, panel, out)
                builder.branch(done)
            builder.position_at_end(done)
            return context.get_dummy_value()

        return types.none(*[types.int64] * 5), emit

    return tile


def _emit_tile(
    builder: Any, kind: int, width: int, num_rows: int, inputs: Any, size_in: Any, panel: Any, out: Any
) -> None:
    def number(value: int) -> ir.Constant:
        return ir.Constant(_I64, value)

    stride = builder.mul(size_in, number(4))
    row_addresses = [inputs]
    for _ in range(1, num_rows):
        row_addresses.append(builder.add(row_addresses[-1], stride))
    before = builder.block
    loop, after = builder.append_basic_block("tile.loop"), builder.append_basic_block("tile.after")
    builder.branch(loop)

    builder.position_at_end(loop)
    index = builder.phi(_I64)
    sums = [builder.phi(_VECTOR) for _ in range(num_rows * VECTORS)]
    place = builder.add(panel, builder.mul(index, number(PANEL * width)))
    weights = [
        _load_panel(builder, builder.add(place, number(LANES * width * vector)), kind) for vector in range(VECTORS)
    ]
    multiply_add = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fma.v{LANES}f32"
    )
    _prefetch(builder, builder.add(place, number(_PREFETCH_BYTES)), PANEL * width)
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    offset = builder.mul(index, number(4))
    totals = []
    for row in range(num_rows):
        scalar = _load(builder, builder.add(row_addresses[row], offset), _F32, 4)
        spread = builder.shuffle_vector(
            builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0)),
            undefined,
            ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES),
        )
        totals += [
            builder.call(multiply_add, [spread, weights[vector], sums[row * VECTORS + vector]])
            for vector in range(VECTORS)
        ]
    following = builder.add(index, number(1))
    for phi, first, then in [
        (index, number(0), following),
        *zip(sums, [ir.Constant(_VECTOR, [0.0] * LANES)] * len(sums), totals, strict=True),
    ]:
        phi.add_incoming(first, before)
        phi.add_incoming(then, loop)
    builder.cbranch(builder.icmp_signed("<", following, size_in), loop, after)

    builder.position_at_end(after)
    for cell, total in enumerate(totals):
        pointer = builder.inttoptr(builder.add(out, number(4 * LANES * cell)), _VECTOR.as_pointer())
        builder.store(total, pointer, align=4)


@njit(inline="always")
def _word(arguments, index):
    return load_int64(arguments + 8 * index)


_float_pointer = ELEMENTS[FLOAT32].pointer


def _product_of(kind: int) -> Any:
    pointer, width, _, narrow = ELEMENTS[kind]
    tile = _tile_of(kind)

    @njit(error_model="numpy")
    def product(arguments):
        num_rows = _word(arguments, NUM_ROWS)
        size_in = _word(arguments, SIZE_IN)
        size_out = _word(arguments, SIZE_OUT)
        out_float = _word(arguments, OUT_FLOAT) != 0
        thread = atomic_add(arguments + 8 * NEXT_THREAD, 1)
        scratch = _word(arguments, SCRATCH) + thread * (MAX_ROWS * PANEL * 4)
        while True:
            item = atomic_add(arguments + 8 * NEXT_ITEM, 1)
            if item >= _word(arguments, NUM_ITEMS):
                return
            panel = _word(arguments, WEIGHT) + item * size_in * (PANEL * width)
            first = item * PANEL
            columns = min(PANEL, size_out - first)
            for row in range(0, num_rows, MAX_ROWS):
                rows = min(MAX_ROWS, num_rows - row)
                tile(rows, _word(arguments, INPUTS) + row * size_in * 4, size_in, panel, scratch)
                sums = carray(_float_pointer(scratch), rows * PANEL)
                if _word(arguments, BIAS) != 0:
                    bias = carray(_float_pointer(_word(arguments, BIAS) + first * 4), columns)
                    for i in range(rows):
                        for j in range(columns):
                            sums[i * PANEL + j] += bias[j]
                place = row * size_out + first
                if out_float:
                    for i in range(rows):
                        wide = carray(_float_pointer(_word(arguments, OUT) + (place + i * size_out) * 4), columns)
                        for j in range(columns):
                            wide[j] = sums[i * PANEL + j]
                else:
                    for i in range(rows):
                        out = carray(pointer(_word(arguments, OUT) + (place + i * size_out) * width), columns)
                        for j in range(columns):
                            out[j] = narrow(sums[i * PANEL + j])

    return product


_product_float32, _product_bfloat16, _product_float16 = (_product_of(kind) for kind in (FLOAT32, BFLOAT16, FLOAT16))


@worker
def matmul_worker(arguments):
    kind = _word(arguments, KIND)
    if kind == FLOAT32:
        _product_float32(arguments)
    elif kind == BFLOAT16:
        _product_bfloat16(arguments)
    else:
        _product_float16(arguments)
