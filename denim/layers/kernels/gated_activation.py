"""silu(gate) · up on CUDA in one pass over memory, for products too large to do it themselves."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from denim.recurrence.kernels.overlap import launch_options, overlaps

# Elements of a program: 16 bytes of bf16 for each of 128 threads.
BLOCK = 1024


@triton.jit
def _silu_mul(
    gate_up_ptr, stride, out_ptr, factor, width: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    if OVERLAP:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    gate_up_ptr += row * stride + at
    gate = tl.load(gate_up_ptr, mask=inside, other=0.0).to(tl.float32) * factor
    up = tl.load(gate_up_ptr + width, mask=inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * width + at, y.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor, gate_scale: float = 1.0) -> Tensor:
    """silu(gate_scale · gate) · up, in fp32, rounded once. gate_up: [T, 2 · width] = [gate | up], rows dense.
    Returns [T, width]."""
    rows, both = gate_up.shape
    width = both // 2
    assert gate_up.stride(1) == 1
    overlap = overlaps(gate_up.device)
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul[(rows, triton.cdiv(width, BLOCK))](
        gate_up,
        gate_up.stride(0),
        out,
        gate_scale,
        width=width,
        BLOCK=BLOCK,
        OVERLAP=overlap,
        **launch_options(overlap),
    )
    return out
