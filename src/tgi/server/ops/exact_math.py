"""exp and log made of IEEE additions, multiplications and divisions alone, each rounded once: the same bits on every
device, thread count and tensor shape, which libm and vector libraries do not promise. Torch reference.

A kernel that computes these must not fuse a multiplication with an addition.
"""

from __future__ import annotations

import torch

from tgi.server.kernels.exact_coefficients import (
    EXP_TERMS,
    EXP_UNDERFLOW,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    LOG_TERMS,
    SQRT_HALF_BITS,
)

_ONE_BITS = 0x3F800000
_MANTISSA = 0x7FFFFF


def exact_exp(x: torch.Tensor) -> torch.Tensor:
    """exp of float32 values ≤ 0, relative error 2e-7; 0 below -87 and for NaN. exp(0) is exactly 1."""
    usable = x >= EXP_UNDERFLOW
    x = torch.where(usable, x, 0.0)
    k = torch.floor(x * LOG2_E + 0.5)
    r = (x - k * LN2_HIGH) - k * LN2_LOW
    p = torch.full_like(r, EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        p = p * r + term
    power = ((k.to(torch.int32) + 127) << 23).view(torch.float32)
    return torch.where(usable, p * power, 0.0)


def exact_log(x: torch.Tensor) -> torch.Tensor:
    """log of positive, normal float32 values; error 2e-7 of the larger of 1 and the result."""
    exponent, mantissa = _split(x)
    return _log_of_parts(exponent, mantissa - 1.0)


def exact_gumbel(words: torch.Tensor) -> torch.Tensor:
    """int64 tensor of u32 words -> standard Gumbel noise -log(-log(u)), u = ((word >> 8) + 1/2) / 2^24, in float32.

    u near 1 gives the largest noise, so 1 - u is kept exact: u has 25 significant bits, one more than float32.
    """
    odd = ((words >> 8) << 1) + 1  # u = odd / 2^25
    exponent, mantissa = _split(odd.to(torch.float32))
    exponent = exponent - 25.0
    near_one = (odd - (1 << 25)).to(torch.float32) * 2.0**-25
    return -exact_log(-_log_of_parts(exponent, torch.where(exponent == 0.0, near_one, mantissa - 1.0)))


def _split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x = mantissa · 2^exponent with the mantissa in [sqrt(1/2), sqrt(2)); both float32."""
    bits = x.view(torch.int32) + (_ONE_BITS - SQRT_HALF_BITS)
    exponent = (bits >> 23) - 127
    mantissa = ((bits & _MANTISSA) + SQRT_HALF_BITS).view(torch.float32)
    return exponent.to(torch.float32), mantissa


def _log_of_parts(exponent: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """log((1 + s) · 2^exponent)"""
    t = s / (s + 2.0)
    u = t * t
    q = torch.full_like(u, LOG_TERMS[0])
    for term in LOG_TERMS[1:]:
        q = q * u + term
    series = t * 2.0 + (t * u) * q
    return exponent * LN2_HIGH + (series + exponent * LN2_LOW)
