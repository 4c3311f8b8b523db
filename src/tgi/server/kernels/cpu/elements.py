"""Arrays of the number formats at raw addresses, for loops that LLVM vectorises by itself. Arithmetic is in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tgi.server.kernels.cpu.vector import BFLOAT16, FLOAT16, FLOAT32

KIND_OF = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


class Elements(NamedTuple):
    """How a compiled loop reads and writes one number format. numba has no half formats: their bits travel as uint16."""

    pointer: Callable[[int], Any]  # address -> pointer for numba's carray
    width: int  # bytes
    widen: Callable[[Any], float]  # element of such an array -> float32
    narrow: Callable[[float], Any]  # float32 -> element, rounded to nearest even


def _pointer(element: types.Type):
    @intrinsic
    def pointer(typingctx, address):
        del typingctx, address

        def emit(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), emit

    return pointer


def _widen(element: types.Type, convert: Callable[[ir.IRBuilder, ir.Value], ir.Value]):
    @intrinsic
    def widen(typingctx, value):
        del typingctx, value

        def emit(context, builder, signature, arguments):
            del context, signature
            return convert(builder, arguments[0])

        return types.float32(element), emit

    return widen


def _narrow(element: types.Type, convert: Callable[[ir.IRBuilder, ir.Value], ir.Value]):
    @intrinsic
    def narrow(typingctx, value):
        del typingctx, value

        def emit(context, builder, signature, arguments):
            del context, signature
            return convert(builder, arguments[0])

        return element(types.float32), emit

    return narrow


def _bfloat16_to_float(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    wide = builder.zext(bits, ir.IntType(32))
    return builder.bitcast(builder.shl(wide, ir.Constant(ir.IntType(32), 16)), ir.FloatType())


def _float_to_bfloat16(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    def word(number: int) -> ir.Constant:
        return ir.Constant(ir.IntType(32), number)

    bits = builder.bitcast(value, ir.IntType(32))
    odd = builder.and_(builder.lshr(bits, word(16)), word(1))
    rounded = builder.lshr(builder.add(builder.add(bits, word(0x7FFF)), odd), word(16))
    # Adding to a NaN's bits may carry it into infinity.
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, word(0x7FC0), rounded), ir.IntType(16))


def _float16_to_float(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())


def _float_to_float16(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    return builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16))


def _same(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    del builder
    return value


ELEMENTS = {
    kind: Elements(_pointer(element), width, _widen(element, to_float), _narrow(element, from_float))
    for kind, element, width, to_float, from_float in (
        (FLOAT32, types.float32, 4, _same, _same),
        (BFLOAT16, types.uint16, 2, _bfloat16_to_float, _float_to_bfloat16),
        (FLOAT16, types.uint16, 2, _float16_to_float, _float_to_float16),
    )
}
