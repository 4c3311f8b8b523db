"""exp and log from single IEEE operations, as `ops/exact_math.py` defines them, for numba. Bits equal torch's."""

from __future__ import annotations

import numpy as np
from numba import njit

from tgi.server.kernels import exact_coefficients as constants
from tgi.server.kernels.cpu.vector import bits_of_float, float_of_bits

_LOG2_E = np.float32(constants.LOG2_E)
_LN2_HIGH = np.float32(constants.LN2_HIGH)
_LN2_LOW = np.float32(constants.LN2_LOW)
_E7, _E6, _E5, _E4, _E3, _E2, _E1, _E0 = (np.float32(term) for term in constants.EXP_TERMS)
_L4, _L3, _L2, _L1, _L0 = (np.float32(term) for term in constants.LOG_TERMS)
_UNDERFLOW = np.float32(constants.EXP_UNDERFLOW)
_SQRT_HALF_BITS = np.int32(constants.SQRT_HALF_BITS)
_SPLIT_SHIFT = np.int32(0x3F800000 - constants.SQRT_HALF_BITS)
_MANTISSA = np.int32(0x7FFFFF)
_BIAS = np.int32(127)
_ZERO, _HALF, _ONE, _TWO = (np.float32(value) for value in (0.0, 0.5, 1.0, 2.0))


@njit(inline="always", error_model="numpy")
def exact_exp(x: np.float32) -> np.float32:
    """exp of x ≤ 0; 0 below -87 and for NaN."""
    safe = x if x >= _UNDERFLOW else _ZERO
    k = np.floor(safe * _LOG2_E + _HALF)
    r = (safe - k * _LN2_HIGH) - k * _LN2_LOW
    p = ((((((_E7 * r + _E6) * r + _E5) * r + _E4) * r + _E3) * r + _E2) * r + _E1) * r + _E0
    power = float_of_bits((np.int32(k) + _BIAS) << np.int32(23))
    return p * power if x >= _UNDERFLOW else _ZERO


@njit(inline="always", error_model="numpy")
def order_of(x):
    """int32 that orders as x does, NaN at the ends. LLVM makes vectors of an integer maximum, not of one that must mind
    NaN."""
    bits = bits_of_float(x)
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@njit(inline="always", error_model="numpy")
def of_order(order):
    """The float32 that `order_of` maps to `order`."""
    return float_of_bits(order ^ ((order >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit(inline="always", error_model="numpy")
def _log_of_parts(exponent, s):
    t = s / (s + _TWO)
    u = t * t
    q = (((_L4 * u + _L3) * u + _L2) * u + _L1) * u + _L0
    return exponent * _LN2_HIGH + ((t * _TWO + (t * u) * q) + exponent * _LN2_LOW)


@njit(inline="always", error_model="numpy")
def exact_gumbel(word):
    """int64 holding a u32 -> standard Gumbel noise."""
    odd = ((word >> np.int64(8)) << np.int64(1)) + np.int64(1)
    bits = bits_of_float(np.float32(np.int32(odd))) + _SPLIT_SHIFT
    exponent = np.float32((bits >> np.int32(23)) - _BIAS) - np.float32(25)
    near_one = np.float32(np.int32(odd - np.int64(1 << 25))) * np.float32(2.0**-25)
    mantissa = float_of_bits((bits & _MANTISSA) + _SQRT_HALF_BITS)
    rate = -_log_of_parts(exponent, near_one if exponent == _ZERO else mantissa - _ONE)
    bits = bits_of_float(rate) + _SPLIT_SHIFT
    exponent = np.float32((bits >> np.int32(23)) - _BIAS)
    mantissa = float_of_bits((bits & _MANTISSA) + _SQRT_HALF_BITS)
    return -_log_of_parts(exponent, mantissa - _ONE)
