"""Activations as FP8 values with one scale for each token and group of 128 channels.

Owns the kernel alone; what the values are for is `denim.layers.fp8_linear`'s business.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

WARPS = 4
ELEMENTS = 2048  # of a row that one program takes: 16 values a thread


@triton.jit
def _quantise(
    x_ptr,
    x_stride,
    values_ptr,
    scales_ptr,
    scale_stride,
    rows,
    groups,
    largest: tl.constexpr,
    smallest: tl.constexpr,
    size: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * block + tl.arange(0, block)
    within = tl.arange(0, size)
    columns = group[:, None] * size + within[None, :]
    there = (group < groups)[:, None] & (within < size)[None, :]
    x = tl.load(x_ptr + row * x_stride + columns, mask=there & (row < rows), other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=1), smallest) / largest
    values = (x / scale[:, None]).to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + row * groups * size + columns, values, mask=there)
    tl.store(scales_ptr + group.to(tl.int64) * scale_stride + row, scale, mask=group < groups)


def quantise_rows(
    x: Tensor, values: Tensor, scales: Tensor, *, size: int, largest: float, smallest: float
) -> None:
    """Write the FP8 values of x and their scales.

    x: [M, K], any row stride, columns contiguous; K is a multiple of `size`. values: [M', K] contiguous,
    M' ≥ M; scales: [K / size, M'] contiguous fp32. A group's scale is its largest magnitude, at least
    `smallest`, over `largest`. Rows of `values` behind the M of x become zeros.
    """
    groups = x.shape[1] // size
    block = min(triton.next_power_of_2(groups), max(1, ELEMENTS // size))
    _quantise[(values.shape[0], triton.cdiv(groups, block))](
        x,
        x.stride(0),
        values,
        scales,
        scales.stride(0),
        x.shape[0],
        groups,
        largest,
        smallest,
        size,
        block,
        num_warps=WARPS,
    )
