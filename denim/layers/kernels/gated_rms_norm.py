"""The gated norm behind a linear rule, norm(x) · scale · silu(gate) or sigmoid(gate), in one pass.

Formula: `denim.layers.norm.GatedRMSNorm`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from denim.recurrence.kernels.overlap import launch_options, overlaps

# Elements of a program: 16 a thread, two loads of 16 bytes of bf16 from each of x and gate.
BLOCK = 2048


@triton.jit(do_not_specialize=["vectors"])
def _gated_rms_norm(
    x_ptr,
    gate_ptr,
    gate_stride,
    scale_ptr,
    out_ptr,
    vectors,
    eps,
    heads: tl.constexpr,
    dim: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    sigmoid: tl.constexpr,
    overlap: tl.constexpr,
):
    vector = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    at = tl.arange(0, block)
    inside = (vector < vectors)[:, None] & (at < dim)[None, :]
    scale = tl.load(scale_ptr + at, mask=at < dim, other=0.0)
    if overlap:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    x = tl.load(x_ptr + vector[:, None] * dim + at[None, :], mask=inside, other=0.0).to(tl.float32)
    gate_at = (vector // heads) * gate_stride + (vector % heads) * dim
    gate = tl.load(gate_ptr + gate_at[:, None] + at[None, :], mask=inside, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 1) / dim + eps)[:, None] * scale[None, :] * tl.sigmoid(gate)
    if not sigmoid:
        y *= gate
    tl.store(out_ptr + vector[:, None] * dim + at[None, :], y.to(out_ptr.dtype.element_ty), mask=inside)


def gated_rms_norm(x: Tensor, gate: Tensor, scale: Tensor, eps: float, *, sigmoid: bool = False) -> Tensor:
    """x / rms(x) · scale · silu(gate), or · sigmoid(gate), over the last dimension, in fp32.

    x: [T, heads, dim] dense; gate: [T, heads · dim], rows any distance apart; scale: [dim] fp32. Returns
    [T, heads · dim] in gate's dtype.
    """
    tokens, heads, dim = x.shape
    assert x.is_contiguous() and gate.stride(1) == 1 and gate.shape == (tokens, heads * dim)
    out = torch.empty(tokens, heads * dim, dtype=gate.dtype, device=x.device)
    block = triton.next_power_of_2(dim)
    rows = max(1, BLOCK // block)
    overlap = overlaps(x.device)
    _gated_rms_norm[(triton.cdiv(tokens * heads, rows),)](
        x,
        gate,
        gate.stride(0),
        scale,
        out,
        tokens * heads,
        eps,
        heads=heads,
        dim=dim,
        rows=rows,
        block=block,
        sigmoid=sigmoid,
        overlap=overlap,
        num_warps=4,
        **launch_options(overlap),
    )
    return out
