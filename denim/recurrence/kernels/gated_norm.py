"""The gate behind an accumulation, and the RMS norm that stands before, behind or not at all beside it.

The plain forms are `denim.layers.norm.GroupedGatedRMSNorm` and the last lines of the layers that use it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from denim.recurrence.kernels.exponentials import sigmoid as squashed
from denim.recurrence.kernels.overlap import launch_options, overlaps

# What stands at the gate's side: no norm, one over gated values, or one whose result is gated.
NO_NORM, NORM_OF_GATED, GATED_NORM = 0, 1, 2

# Values that a program takes where there is no norm to see them all.
BLOCK = 1024
VALUES_PER_WARP, MOST_WARPS = 512, 16


@triton.jit
def _gated_norm(
    y_ptr,
    gate_ptr,
    gate_stride,
    scale_ptr,
    out_ptr,
    total,
    size,
    eps,
    norm: tl.constexpr,
    sigmoid: tl.constexpr,
    block: tl.constexpr,
    overlap: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, block)
    at = tl.program_id(1) * size + part
    mask = (part < size) & (at < total)
    if norm != 0:
        scale = tl.load(scale_ptr + at, mask=mask, other=0.0)
    if overlap:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    z = tl.load(gate_ptr + row * gate_stride + at, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row * total + at, mask=mask, other=0.0).to(tl.float32)
    gate = squashed(z)
    if not sigmoid:
        gate = z * gate
    if norm != 2:
        y = y * gate
    if norm != 0:
        y = y * tl.rsqrt(tl.sum(y * y, 0) / size + eps) * scale
    if norm == 2:
        y = y * gate
    tl.store(out_ptr + row * total + at, y.to(out_ptr.dtype.element_ty), mask=mask)


def gated_norm(
    y: Tensor,
    gate: Tensor,
    scale: Tensor | None,
    eps: float = 0.0,
    *,
    groups: int = 1,
    before_gate: bool = False,
    sigmoid: bool = False,
) -> Tensor:
    """Rows of y gated and normed in one pass: [T, D] in gate's dtype; fp32 inside.

    y: [T, D] dense; gate: [T, D], rows any distance apart; scale: [D] fp32, or None for no norm. The root
    mean square is taken over each of `groups` equal parts of a row. `before_gate`: the norm comes first.
    """
    rows, total = y.shape
    norm = NO_NORM if scale is None else GATED_NORM if before_gate else NORM_OF_GATED
    assert y.is_contiguous() and gate.stride(1) == 1 and total % groups == 0
    out = y.new_empty(rows, total, dtype=gate.dtype)
    part = min(total, BLOCK) if norm == NO_NORM else total // groups
    block = triton.next_power_of_2(part)
    overlap = overlaps(y.device)
    if rows:
        _gated_norm[(rows, triton.cdiv(total, part))](
            y,
            gate,
            gate.stride(0),
            scale,
            out,
            total,
            part,
            eps,
            norm=norm,
            sigmoid=sigmoid,
            block=block,
            overlap=overlap,
            num_warps=max(1, min(MOST_WARPS, block // VALUES_PER_WARP)),
            **launch_options(overlap),
        )
    return out
