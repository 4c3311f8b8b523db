"""Constants of the exp and log that every device computes alike: plain numbers, each exact in float32."""

from __future__ import annotations

# exp(x) = 2^k · P(r), k = floor(x · LOG2_E + ½), r = (x − k · LN2_HIGH) − k · LN2_LOW, |r| ≤ ln 2 / 2. LN2_HIGH has 9
# significant bits, so k · LN2_HIGH is exact for every k that occurs. P is the Taylor series to r^7 / 7!: error 6e-9.
LOG2_E = 1.4426950216293335
LN2_HIGH = 0.693359375
LN2_LOW = -0.00021219444170128554
EXP_TERMS = (  # r^7 first
    0.00019841270113829523,
    0.0013888889225199819,
    0.008333333767950535,
    0.0416666679084301,
    0.1666666716337204,
    0.5,
    1.0,
    1.0,
)
EXP_UNDERFLOW = -87.0  # below this exp counts as 0

# log(f) on [sqrt(1/2), sqrt(2)), s = f − 1, t = s / (2 + s): log(f) = 2t + t · u · Q(u), u = t². Q is the series of
# atanh: 2/3 + 2/5 u + 2/7 u² + 2/9 u³ + 2/11 u⁴; error 2e-9 at |t| ≤ 0.1716.
LOG_TERMS = (  # u^4 first
    0.1818181872367859,
    0.2222222238779068,
    0.2857142984867096,
    0.4000000059604645,
    0.6666666865348816,
)
SQRT_HALF_BITS = 0x3F3504F3  # sqrt(1/2) as float32
