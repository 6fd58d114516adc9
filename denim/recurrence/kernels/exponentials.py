"""Exponentials, SiLU and softplus as device functions of few instructions.

A GPU's own exponential is to base 2. `tl.exp`, division and every logarithm spend several times as many
instructions, for arguments that do not occur here: denormal numbers, quotients near overflow.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
SOFTPLUS_LINEAR = tl.constexpr(20.0)  # above it softplus(x) = x in fp32
# log(1 + e) / e for e of 0 .. 1, lowest power first: least squares on Chebyshev's points, reweighted until
# the relative error is level. It is 3e-8 there, 2e-7 with the roundings of fp32.
LOG_SERIES = tl.constexpr(
    (
        0.99999997,
        -0.499994931,
        0.333190968,
        -0.24842982,
        0.19106006,
        -0.136632442,
        0.0782259335,
        -0.0295052275,
        0.00523269145,
    )
)


@triton.jit
def exp(x):
    """e^x, fp32."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def sigmoid(x):
    """fp32. The reciprocal is a squared reciprocal root: no division."""
    root = tl.rsqrt(1.0 + tl.exp2(-x * LOG2_E))
    return root * root


@triton.jit
def silu(x):
    """fp32."""
    return x * sigmoid(x)


@triton.jit
def softplus(x):
    """log(1 + e^x) = max(x, 0) + log(1 + e^-|x|), fp32, to fp32's accuracy also where it is small."""
    e = tl.exp2(-tl.abs(x) * LOG2_E)
    y = e * LOG_SERIES[8] + LOG_SERIES[7]
    for i in tl.static_range(7):
        y = y * e + LOG_SERIES[6 - i]
    return tl.maximum(x, 0.0) + y * e
