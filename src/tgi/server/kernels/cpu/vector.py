"""Building blocks of the CPU kernels: memory by address, number formats, and a small matrix product held in registers.
Written as LLVM IR through numba: no compiler is needed, and LLVM fits the vectors to what the machine has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

# Kinds of elements, as the kernels take them at run time.
FLOAT32, BFLOAT16, FLOAT16 = range(3)
KINDS = (FLOAT32, BFLOAT16, FLOAT16)

LANES = 16
WIDE = 4 * LANES  # columns of a wide product
# Sums of a product stay in registers: 6 rows of 4 vectors where there are 32 of 512 bits, else one row.
MAX_ROWS = 6 if binding.get_host_cpu_features().get("avx512f") else 1

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32 = ir.FloatType()
_ELEMENT = {FLOAT32: _F32, BFLOAT16: _I16, FLOAT16: ir.HalfType()}
_WIDTH = {FLOAT32: 4, BFLOAT16: 2, FLOAT16: 2}


def _intrinsic(function: Callable[..., Any]) -> Any:
    """Called from compiled code without the typing context, which no type checker can know."""
    return intrinsic(function)


def _literal_intrinsic(function: Callable[..., Any]) -> Any:
    return intrinsic(prefer_literal=True)(function)


def _shaped(scalar: ir.Type, lanes: int) -> ir.Type:
    return ir.VectorType(scalar, lanes) if lanes else scalar


def _constant(scalar: ir.Type, value: int, lanes: int = 0) -> ir.Constant:
    return ir.Constant(_shaped(scalar, lanes), [value] * lanes if lanes else value)


def _load(builder: Any, address: Any, type_: ir.Type, align: int) -> Any:
    value = builder.load(builder.inttoptr(address, type_.as_pointer()), typ=type_)
    value.align = align
    return value


def _store(builder: Any, value: Any, address: Any, align: int) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def _to_float(builder: Any, value: Any, kind: int, lanes: int = 0) -> Any:
    if kind == FLOAT32:
        return value
    if kind == FLOAT16:
        return builder.fpext(value, _shaped(_F32, lanes))
    bits = builder.shl(builder.zext(value, _shaped(_I32, lanes)), _constant(_I32, 16, lanes))
    return builder.bitcast(bits, _shaped(_F32, lanes))


def _from_float(builder: Any, value: Any, kind: int) -> Any:
    """A scalar, rounded to nearest even."""
    if kind == FLOAT32:
        return value
    if kind == FLOAT16:
        return builder.fptrunc(value, ir.HalfType())
    bits = builder.bitcast(value, _I32)
    odd = builder.and_(builder.lshr(bits, _constant(_I32, 16)), _constant(_I32, 1))
    rounded = builder.lshr(builder.add(builder.add(bits, _constant(_I32, 0x7FFF)), odd), _constant(_I32, 16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, _constant(_I32, 0x7FC0), rounded), _I16)


def _element(builder: Any, address: Any, index: Any, kind: int) -> Any:
    # One base and an index, not a sum of integers: LLVM vectorises only what it can see through.
    return builder.gep(builder.inttoptr(address, _ELEMENT[kind].as_pointer()), [index], source_etype=_ELEMENT[kind])


@_literal_intrinsic
def load_float(typingctx, kind, address, index):
    """Element `index` of the array of a literal kind at `address`, as float32."""
    del typingctx, address, index
    literal = kind.literal_value

    def emit(context, builder, signature, arguments):
        del context, signature
        value = builder.load(
            _element(builder, arguments[1], arguments[2], literal), typ=_ELEMENT[literal], align=_WIDTH[literal]
        )
        return _to_float(builder, value, literal)

    return types.float32(kind, types.int64, types.int64), emit


@_literal_intrinsic
def store_float(typingctx, kind, address, index, value):
    """Store a float32 as element `index` of the array of a literal kind at `address`."""
    del typingctx, address, index, value
    literal = kind.literal_value

    def emit(context, builder, signature, arguments):
        del signature
        value = _from_float(builder, arguments[3], literal)
        builder.store(value, _element(builder, arguments[1], arguments[2], literal), align=_WIDTH[literal])
        return context.get_dummy_value()

    return types.none(kind, types.int64, types.int64, types.float32), emit


def _load_int(bits: ir.IntType, numba_type):
    def typed(typingctx, address):
        del typingctx, address

        def emit(context, builder, signature, arguments):
            del context, signature
            return _load(builder, arguments[0], bits, bits.width // 8)

        return numba_type(types.int64), emit

    return typed


load_int64 = _intrinsic(_load_int(_I64, types.int64))
load_int32 = _intrinsic(_load_int(_I32, types.int32))


@_intrinsic
def store_int64(typingctx, address, value):
    del typingctx, address, value

    def emit(context, builder, signature, arguments):
        del signature
        _store(builder, arguments[1], arguments[0], 8)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), emit


@_intrinsic
def float_of_bits(typingctx, bits):
    del typingctx, bits

    def emit(context, builder, signature, arguments):
        del context, signature
        return builder.bitcast(arguments[0], _F32)

    return types.float32(types.int32), emit


@_intrinsic
def bits_of_float(typingctx, value):
    del typingctx, value

    def emit(context, builder, signature, arguments):
        del context, signature
        return builder.bitcast(arguments[0], _I32)

    return types.int32(types.float32), emit


@_intrinsic
def add_product(typingctx, kind, rows, columns, out, out_stride, left, left_stride, right, right_stride, n):
    """out[rows, columns] += left[rows, n] @ right[n, columns], n ≥ 1.

    rows: 1 to MAX_ROWS; columns: LANES or WIDE. out and left are float32, right is of `kind`. Addresses in bytes,
    strides of rows in elements. Sums are in float32 and run over n in order.
    """
    del typingctx, kind, rows, columns, out, out_stride, left, left_stride, right, right_stride, n

    def emit(context, builder, signature, arguments):
        del signature
        kind, rows, columns, *operands = arguments
        done = builder.append_basic_block("product.done")
        case = builder.add(
            builder.mul(builder.add(builder.mul(kind, _constant(_I64, 8)), rows), _constant(_I64, 2)),
            builder.zext(builder.icmp_signed("==", columns, _constant(_I64, WIDE)), _I64),
        )
        choose = builder.switch(case, done)
        for a_kind in KINDS:
            for num_rows in range(1, MAX_ROWS + 1):
                for is_wide in (0, 1):
                    block = builder.append_basic_block("product")
                    choose.add_case(_constant(_I64, (a_kind * 8 + num_rows) * 2 + is_wide), block)
                    builder.position_at_end(block)
                    _emit_product(builder, a_kind, num_rows, 4 if is_wide else 1, *operands)
                    builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.none(*[types.int64] * 10), emit


def _emit_product(
    builder: Any,
    kind: int,
    num_rows: int,
    num_vectors: int,
    out: Any,
    out_stride: Any,
    left: Any,
    left_stride: Any,
    right: Any,
    right_stride: Any,
    n: Any,
) -> None:
    vector = ir.VectorType(_F32, LANES)
    width = _WIDTH[kind]

    def plus(address: Any, num_bytes: int) -> Any:
        return builder.add(address, _constant(_I64, num_bytes))

    def row_address(base: Any, stride: Any, row: int) -> Any:
        return builder.add(base, builder.mul(stride, _constant(_I64, 4 * row)))

    cells = [
        plus(row_address(out, out_stride, row), 4 * LANES * column)
        for row in range(num_rows)
        for column in range(num_vectors)
    ]
    left_rows = [row_address(left, left_stride, row) for row in range(num_rows)]
    right_step = builder.mul(right_stride, _constant(_I64, width))
    begin = [_load(builder, cell, vector, 4) for cell in cells]
    before = builder.block
    loop = builder.append_basic_block("product.loop")
    after = builder.append_basic_block("product.after")
    builder.branch(loop)

    builder.position_at_end(loop)
    index, right_row = builder.phi(_I64), builder.phi(_I64)
    sums = [builder.phi(vector) for _ in cells]
    columns = []
    for column in range(num_vectors):
        loaded = _load(builder, plus(right_row, width * LANES * column), ir.VectorType(_ELEMENT[kind], LANES), width)
        columns.append(_to_float(builder, loaded, kind, LANES))
    multiply_add = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fmuladd.v{LANES}f32"
    )
    undefined = ir.Constant(vector, ir.Undefined)
    offset = builder.shl(index, _constant(_I64, 2))
    totals = []
    for row in range(num_rows):
        factor = _load(builder, builder.add(left_rows[row], offset), _F32, 4)
        spread = builder.shuffle_vector(
            builder.insert_element(undefined, factor, _constant(_I32, 0)), undefined, _constant(_I32, 0, LANES)
        )
        totals += [
            builder.call(multiply_add, [spread, columns[column], sums[row * num_vectors + column]])
            for column in range(num_vectors)
        ]
    following = builder.add(index, _constant(_I64, 1))
    for phi, first, then in [
        (index, _constant(_I64, 0), following),
        (right_row, right, builder.add(right_row, right_step)),
        *zip(sums, begin, totals, strict=True),
    ]:
        phi.add_incoming(first, before)
        phi.add_incoming(then, loop)
    builder.cbranch(builder.icmp_signed("<", following, n), loop, after)

    builder.position_at_end(after)
    for cell, total in zip(cells, totals, strict=True):
        _store(builder, total, cell, 4)


def _pointer_to(numba_type: types.Type):
    def typed(typingctx, address):
        del typingctx, address

        def emit(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(numba_type)(types.int64), emit

    return typed


# Address -> pointer, for numba's carray.
float32_at = _intrinsic(_pointer_to(types.float32))
int32_at = _intrinsic(_pointer_to(types.int32))
int64_at = _intrinsic(_pointer_to(types.int64))
uint8_at = _intrinsic(_pointer_to(types.uint8))
