"""The inverse of a unit lower triangular matrix in registers.

Owns the arithmetic alone; shared by the delta rules' kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(16)  # the least that tensor cores multiply


@triton.jit
def _twice_as_large(inverse, lower, row, column, level: tl.constexpr, precision: tl.constexpr):
    """From the inverses of the diagonal blocks of n = 2^level rows to those of 2 n."""
    pair = (row >> (level + 1) == column >> (level + 1)) & (row >> level != column >> level)
    blocks = tl.where(pair, lower, 0.0)
    if precision == "ieee":
        product = tl.dot(inverse, blocks, input_precision="ieee")
        change = tl.dot(product, inverse, input_precision="ieee")
    else:
        narrow = inverse.to(tl.float16)
        product = tl.dot(narrow, blocks)
        change = tl.dot(product.to(tl.float16), narrow)
    return inverse - change


@triton.jit
def inverse_of_unit_lower(lower, size: tl.constexpr, precision: tl.constexpr):
    """(I + lower)^-1 in fp32; lower: [size, size] fp32, 0 above its diagonal, which is not read; size 16, 32
    or 64.

    By diagonal blocks of twice the size from step to step. With those of n rows inverted,

        [ L1    ]^-1      [  L1^-1                    ]
        [ A  L2 ]     =   [ -L2^-1 A L1^-1     L2^-1  ]

    and T - T (the blocks A) T does that for all blocks at once. It is substitution by blocks, so nothing in
    it outgrows the result (a series of powers of `lower` does: binomials for equal keys). The steps inside
    blocks of 16 rows are products of 16 x 16 for all blocks, the others products of the whole matrix.
    precision "ieee": fp32; otherwise operands have 11 bits (fp16, whose range holds them: entries of the
    delta rules' inverses are at most 1 and max beta for keys of length 1), sums are fp32.
    """
    blocks: tl.constexpr = size // BLOCK
    of_row = tl.arange(0, blocks)[:, None, None, None]
    of_column = tl.arange(0, blocks)[None, None, :, None]
    if precision != "ieee":
        lower = lower.to(tl.float16)
    squares = tl.reshape(lower, [blocks, BLOCK, blocks, BLOCK])
    diagonal = tl.sum(tl.where(of_row == of_column, squares, 0.0), 2)
    row = tl.arange(0, BLOCK)[None, :, None]
    column = tl.arange(0, BLOCK)[None, None, :]
    below = (row >> 1 == column >> 1) & (row > column)
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(below, diagonal, 0.0)
    for level in tl.static_range(1, 4):
        inverse = _twice_as_large(inverse, diagonal, row, column, level, precision)

    whole = tl.reshape(tl.where(of_row == of_column, inverse[:, :, None, :], 0.0), [size, size])
    row = tl.arange(0, size)[:, None]
    column = tl.arange(0, size)[None, :]
    for level in tl.static_range(4, 6):
        if (1 << level) < size:
            whole = _twice_as_large(whole, lower, row, column, level, precision)
    return whole
