"""The inverse of a unit lower triangular matrix in registers.

Owns the arithmetic alone; shared by the delta rules' kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def inverse_of_unit_lower(lower, size: tl.constexpr, precision: tl.constexpr):
    """(I + lower)^-1 of a strictly lower triangular [size, size] in fp32; size: a power of two up
    to 64.

    By blocks of twice the size from step to step. With the diagonal blocks of n rows inverted,

        [ L1    ]^-1      [  L1^-1                    ]
        [ A  L2 ]     =   [ -L2^-1 A L1^-1     L2^-1  ]

    and T - T (the blocks A) T does that for all blocks at once. It is substitution by blocks, so nothing in
    it outgrows the result (a series of powers of `lower` does: binomials for equal keys). precision "ieee":
    fp32; otherwise operands have 11 bits (fp16, whose range holds them: entries of the inverse are at most
    max beta for keys of length 1), sums are fp32.
    """
    row = tl.arange(0, size)[:, None]
    column = tl.arange(0, size)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(row >> 1 == column >> 1, lower, 0.0)
    for level in tl.static_range(1, 6):
        if (1 << level) < size:
            pair = (row >> (level + 1) == column >> (level + 1)) & (row >> level != column >> level)
            blocks = tl.where(pair, lower, 0.0)
            if precision == "ieee":
                left = tl.dot(inverse, blocks, input_precision="ieee")
                inverse -= tl.dot(left, inverse, input_precision="ieee")
            else:
                narrow = inverse.to(tl.float16)
                left = tl.dot(narrow, blocks.to(tl.float16))
                inverse -= tl.dot(left.to(tl.float16), narrow)
    return inverse
