"""The RMS norm of rows on CUDA, in one pass over memory.

Formula: `denim.layers.norm`. In a chain of kernels it may begin before its predecessor's end, see
`denim.recurrence.kernels.overlap`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from denim.recurrence.kernels.overlap import launch_options, overlaps

# Elements that one warp takes of a row: 8 a thread, 16 bytes of bf16.
WARP_ELEMENTS = 256
MOST_WARPS = 16


@triton.jit
def _rms_norm(
    x_ptr,
    x_stride,
    scale_ptr,
    out_ptr,
    eps,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl_cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < DIM
    scale = tl.load(scale_ptr + at, mask=inside, other=0.0)
    if OVERLAP:
        tl_cuda.gdc_wait()
    x = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    y = wide * tl.rsqrt(tl.sum(wide * wide, 0) / DIM + eps) * scale
    tl.store(out_ptr + row * DIM + at, y.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x / rms(x) · scale of every row, computed in fp32. x: [T, dim], rows dense; scale: [dim] fp32.
    Returns [T, dim] in x's dtype."""
    rows, dim = x.shape
    out = torch.empty(rows, dim, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(dim)
    overlap = overlaps(x.device)
    assert x.stride(1) == 1 and scale.dtype == torch.float32 and scale.shape == (dim,)
    _rms_norm[(rows,)](
        x,
        x.stride(0),
        scale,
        out,
        eps,
        DIM=dim,
        BLOCK=block,
        OVERLAP=overlap,
        num_warps=min(max(block // WARP_ELEMENTS, 1), MOST_WARPS),
        **launch_options(overlap),
    )
    return out
