"""Exponentials, SiLU and softplus as device functions of few instructions.

A GPU's own exponential and logarithm are to base 2. `tl.exp`, `tl.log` and division spend several times as
many instructions for arguments that do not occur here: denormal numbers, quotients near overflow.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Above it softplus(x) is x in fp32, as in torch.
SOFTPLUS_LINEAR = tl.constexpr(20.0)
# Below it 1 + e has lost so much of e that four terms of the series of log(1 + e) are nearer.
SOFTPLUS_SERIES = tl.constexpr(0.015625)


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
    """log(1 + e^x), fp32, to fp32's accuracy also where it is small."""
    e = tl.exp2(tl.minimum(x, SOFTPLUS_LINEAR) * LOG2_E)
    series = e * (1.0 - e * (0.5 - e * (0.3333333333 - 0.25 * e)))
    y = tl.where(e < SOFTPLUS_SERIES, series, tl.log2(1.0 + e) * LN_2)
    return tl.where(x > SOFTPLUS_LINEAR, x, y)
