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
    """How a compiled loop reads and writes one number format. numba has no halves: their bits travel as uint16.

    The functions are numba's, for compiled code only.
    """

    pointer: Any  # address -> pointer for carray
    width: int  # bytes
    widen: Any  # element of such an array -> float32
    narrow: Any  # float32 -> element, rounded to nearest even


def _pointer(element: types.Type):
    @intrinsic
    def pointer(typingctx, address):
        del typingctx, address

        def emit(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), emit

    return pointer


def _conversion(source: types.Type, target: types.Type, convert: Callable[[Any, Any], Any]):
    @intrinsic
    def conversion(typingctx, value):
        del typingctx, value

        def emit(context, builder, signature, arguments):
            del context, signature
            return convert(builder, arguments[0])

        return target(source), emit

    return conversion


def _bfloat16_to_float(builder: Any, bits: Any) -> Any:
    wide = builder.zext(bits, ir.IntType(32))
    return builder.bitcast(builder.shl(wide, ir.Constant(ir.IntType(32), 16)), ir.FloatType())


def _float_to_bfloat16(builder: Any, value: Any) -> Any:
    def word(number: int) -> ir.Constant:
        return ir.Constant(ir.IntType(32), number)

    bits = builder.bitcast(value, ir.IntType(32))
    odd = builder.and_(builder.lshr(bits, word(16)), word(1))
    rounded = builder.lshr(builder.add(builder.add(bits, word(0x7FFF)), odd), word(16))
    # Adding to a NaN's bits may carry it into infinity.
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, word(0x7FC0), rounded), ir.IntType(16))


def _float16_to_float(builder: Any, bits: Any) -> Any:
    return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())


def _float_to_float16(builder: Any, value: Any) -> Any:
    return builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16))


def _same(builder: Any, value: Any) -> Any:
    del builder
    return value


ELEMENTS = {
    kind: Elements(
        _pointer(element),
        width,
        _conversion(element, types.float32, to_float),
        _conversion(types.float32, element, from_float),
    )
    for kind, element, width, to_float, from_float in (
        (FLOAT32, types.float32, 4, _same, _same),
        (BFLOAT16, types.uint16, 2, _bfloat16_to_float, _float_to_bfloat16),
        (FLOAT16, types.uint16, 2, _float16_to_float, _float_to_float16),
    )
}
