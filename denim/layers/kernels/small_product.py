"""Products of a few rows with a weight, y = x Wᵀ, on CUDA: bound by the weight's bytes, not by FLOPs.

Owns the choice of kernel and tiles. Around the product the kernels also do what would otherwise be kernels of
their own: silu(gate) · up and the sum with the residual behind it, and for one row the RMS norm before it.
Knows nothing of layers.

A chain of such products is short of nothing but time to start: launch, first loads, the last sums. So each
kernel is launched while its predecessor still runs (`denim.recurrence.kernels.overlap`); for one row the
weight is on the way into registers before the kernel waits for the row, and on Hopper (`hopper_few_rows`)
into shared memory before it waits for its rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from denim.layers.kernels.few_rows import launch_few_rows
from denim.layers.kernels.hopper_few_rows import cut_of, launch_hopper_few_rows
from denim.layers.kernels.one_row import launch_one_row
from denim.layers.kernels.rms_norm import rms_norm
from denim.recurrence.kernels.overlap import overlaps

# Programs that an H200 runs at once, one on each processor (132), rounded down.
FULL = 128
# K that a program takes at least where several share a tile, if there is so much.
LEAST_PART = 512


class Tiles(NamedTuple):
    """How a product is cut up; fields as in `launch_few_rows`. With one row: `launch_one_row`, where K is not
    split and tiles are not staged."""

    rows: int
    columns: int
    depth: int
    splits: int = 1
    swapped: bool = False
    warps: int = 4
    stages: int = 4


def row_block(rows: int) -> int:
    """Rows that tensor cores are given for so many."""
    return 16 if rows <= 16 else 32 if rows <= 32 else 64


def tiles_for(rows: int, n: int, k: int, *, gated: bool, width: int) -> Tiles:
    """Tiles of a product of `rows` rows with [n, k] (twice that if `gated`), elements of `width` bytes.

    The best of those tried on an H200 for the products of models with hidden sizes of 1024 and 4096.
    """
    if rows == 1:
        depth = min(triton.next_power_of_2(k), 4096)
        lanes = 2 if depth == 4096 and n < 4096 else 4
        return Tiles(1, lanes // 2 if gated else lanes, depth, warps=max(1, depth // 512))
    block = row_block(rows)
    columns = 32 if gated else 64
    tiles = triton.cdiv(n, columns)
    if tiles >= FULL // 2:
        wide_rows = block == 64 and tiles > 8 * FULL
        return Tiles(block, columns, (64 if wide_rows else 128) * 2 // width, swapped=True)
    if block == 16:
        splits = min(max(k // LEAST_PART, 1), 8)
        return Tiles(block, columns, 256 // width, splits, swapped=True)
    columns = 8 if gated else 16
    return Tiles(64, columns, 512 // width, splits=max(1, FULL // triton.cdiv(n, columns)), stages=3)


def small_product(
    x: Tensor,
    weight: Tensor,
    *,
    scale: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    gate_scale: float = 1.0,
    add: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    arrivals: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """y = f(norm(x) Wᵀ) + add, [M, N] in `out_dtype`, None: x's.

    x: [M, K], rows dense, M ≤ 64; weight: [N, K] dense, or [2 N, K] = [gate | up] if `gated`, where
    f = silu(gate_scale · gate) · up; both of one dtype. scale: [K] fp32, the factor of an RMS norm with `eps`
    before the product (None: no norm). add: [M, N]. fp32 inside, rounded once at the end; the normed rows are
    rounded before the product as well if M > 1. fp32 products are exact fp32 (no TF32).
    arrivals: int32 zeros, one for each tile that programs may share, which no other product in flight uses;
    without it K is not split. tiles: cut like this; None: as `tiles_for` says.
    """
    m, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    assert x.stride(1) == 1 and weight.is_contiguous() and weight.shape[1] == k and x.dtype == weight.dtype
    assert add is None or (add.shape == (m, n) and add.stride(1) == 1)
    out = torch.empty(m, n, dtype=out_dtype or x.dtype, device=x.device)
    if m > 1 and scale is not None:
        x = rms_norm(x, scale, eps)
    around = {"gated": gated, "gate_scale": gate_scale}
    cut = cut_of(x, weight, n, gated) if tiles is None else None
    if cut is not None:
        launch_hopper_few_rows(x, weight, add, out, cut, **around)
        return out
    tiles = tiles or tiles_for(m, n, k, gated=gated, width=x.element_size())
    if arrivals is None:
        tiles = tiles._replace(splits=1)
    around["overlap"] = overlaps(x.device)
    if m == 1:
        cut = {"columns": tiles.columns, "depth": tiles.depth, "warps": tiles.warps}
        launch_one_row(x, weight, scale, add, out, eps=eps, **cut, **around)
    else:
        launch_few_rows(x, weight, add, out, arrivals, **tiles._asdict(), **around)
    return out
