"""Cosines and sines of a step's positions, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from denim.recurrence.kernels.overlap import launch_options, overlaps

ROWS = 16  # positions of a program


@triton.jit(do_not_specialize=["tokens"])
def _rotary_angles(
    positions_ptr,
    frequencies_ptr,
    cos_ptr,
    sin_ptr,
    tokens,
    factor,
    half: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    overlap: tl.constexpr,
):
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    d = tl.arange(0, block)
    if overlap:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    position = tl.load(positions_ptr + row, mask=row < tokens, other=0).to(tl.float32)
    angle = position[:, None] * tl.load(frequencies_ptr + d, mask=d < half, other=0.0)[None, :]
    inside = (row < tokens)[:, None] & (d < half)[None, :]
    at = row[:, None] * half + d[None, :]
    tl.store(cos_ptr + at, (tl.cos(angle) * factor).to(cos_ptr.dtype.element_ty), mask=inside)
    tl.store(sin_ptr + at, (tl.sin(angle) * factor).to(sin_ptr.dtype.element_ty), mask=inside)


def rotary_angles(
    positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin of positions [T] int64 times frequencies [half] fp32, times `factor`: two [T, 1, half] in
    `dtype`, computed in fp32."""
    tokens, half = len(positions), len(frequencies)
    overlap = overlaps(positions.device)
    cos, sin = (torch.empty(tokens, 1, half, dtype=dtype, device=positions.device) for _ in range(2))
    _rotary_angles[(triton.cdiv(tokens, ROWS),)](
        positions,
        frequencies,
        cos,
        sin,
        tokens,
        factor,
        half=half,
        rows=ROWS,
        block=triton.next_power_of_2(half),
        overlap=overlap,
        **launch_options(overlap),
    )
    return cos, sin
