"""out · sigmoid(gate) in place, for an attention that does not do it itself."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from denim.recurrence.kernels.overlap import launch_options, overlaps

BLOCK = 1024  # elements of a program: 16 bytes of bf16 for each of 128 threads


@triton.jit
def _gate_output(
    out_ptr,
    gate_ptr,
    gate_token_stride,
    gate_head_stride,
    dim: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    overlap: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    if overlap:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    place = out_ptr + token * width + at
    gate_at = token * gate_token_stride + (at // dim) * gate_head_stride + at % dim
    gate = tl.load(gate_ptr + gate_at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(place, mask=inside, other=0.0).to(tl.float32) * tl.sigmoid(gate)
    tl.store(place, y.to(out_ptr.dtype.element_ty), mask=inside)


def gate_output(out: Tensor, gate: Tensor) -> None:
    """out *= sigmoid(gate), in fp32, rounded once. Both [T, heads, dim]; out dense, gate's last dimension
    too."""
    tokens, heads, dim = out.shape
    assert out.is_contiguous() and gate.stride(2) == 1 and gate.shape == out.shape
    overlap = overlaps(out.device)
    _gate_output[(tokens, triton.cdiv(heads * dim, BLOCK))](
        out,
        gate,
        gate.stride(0),
        gate.stride(1),
        dim=dim,
        width=heads * dim,
        block=BLOCK,
        overlap=overlap,
        **launch_options(overlap),
    )
