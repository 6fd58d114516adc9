"""Products of a few rows with a weight, y = x Wᵀ, on CUDA: bound by the weight's bytes, not by FLOPs.

Owns the kernels and the choice of their tiles. Around the product a kernel may also do what would otherwise
be a kernel of its own: the RMS norm of x before it, silu(gate) · up and the sum with the residual after it.
Knows nothing of layers.

The sum over K is split among the warps of one program, never among programs: the order of additions depends
on the shapes alone, there is no workspace, and a captured graph has nothing to reset.

In a chain of such kernels each would begin with an idle memory bus: launch, first loads, and only then data.
So on devices that can (Hopper and later) each kernel is launched while its predecessor still runs
(programmatic dependent launch), fetches its share of the weight, which no kernel writes, and only then waits
for the predecessor's results.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from denim.layers.kernels.overlap import overlaps

# Rows that a product may have to run here.
MOST_ROWS = 64


class Tiles(NamedTuple):
    """One program computes `rows` x `columns` of y, `depth` of K at a time in each of `splits` parts.

    `stages`: tiles of the weight in flight. With `rows` = 1 all is done in plain multiplications, else on
    tensor cores, which take 16 rows at least."""

    rows: int
    columns: int
    depth: int
    splits: int
    warps: int
    stages: int


@triton.jit
def _finish(y, up, mean_square, eps, gate_scale, NORM: tl.constexpr, GATED: tl.constexpr):
    """The norm's factor of each row and the activation, behind the product in fp32."""
    if NORM:
        factor = tl.rsqrt(mean_square + eps)
        y *= factor
        up *= factor
    if GATED:
        y *= gate_scale
        y = y * tl.sigmoid(y) * up
    return y


@triton.jit
def _one_row(
    x_ptr,
    x_stride,
    weight_ptr,
    scale_ptr,
    add_ptr,
    add_stride,
    out_ptr,
    n,
    eps,
    gate_scale,
    k: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1)
    at = tl.arange(0, DEPTH)
    valid = column < n
    weight_ptr += column[:, None].to(tl.int64) * k + at[None, :]
    up_ptr = weight_ptr + n.to(tl.int64) * k
    mask = valid[:, None] & (at < k)[None, :]
    w = tl.load(weight_ptr, mask=mask, other=0.0)
    if GATED:
        w_up = tl.load(up_ptr, mask=mask, other=0.0)
    if OVERLAP:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    x_ptr += row * x_stride + at
    acc = tl.zeros([COLUMNS, DEPTH], tl.float32)
    acc_up = tl.zeros([COLUMNS, DEPTH], tl.float32)
    squares = tl.zeros([DEPTH], tl.float32)
    for first in tl.static_range(0, k, DEPTH):
        if first > 0:
            mask = valid[:, None] & (first + at < k)[None, :]
            w = tl.load(weight_ptr + first, mask=mask, other=0.0)
            if GATED:
                w_up = tl.load(up_ptr + first, mask=mask, other=0.0)
        x = tl.load(x_ptr + first, mask=first + at < k, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(scale_ptr + first + at, mask=first + at < k, other=0.0)
        acc += w.to(tl.float32) * x[None, :]
        if GATED:
            acc_up += w_up.to(tl.float32) * x[None, :]
    mean_square = tl.sum(squares, 0) / k
    y = _finish(tl.sum(acc, 1), tl.sum(acc_up, 1), mean_square, eps, gate_scale, NORM, GATED)
    if ADD:
        y += tl.load(add_ptr + row * add_stride + column, mask=valid, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * n + column, y.to(out_ptr.dtype.element_ty), mask=valid)


@triton.jit
def _few_rows(
    x_ptr,
    x_stride,
    weight_ptr,
    scale_ptr,
    add_ptr,
    add_stride,
    out_ptr,
    m,
    n,
    eps,
    gate_scale,
    k: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    FETCH: tl.constexpr,
    FETCH_WIDTH: tl.constexpr,
    FETCH_PIECES: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    first_column = tl.program_id(0) * COLUMNS
    column = first_column + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.arange(0, SPLITS)
    at = tl.arange(0, DEPTH)
    valid_row = row < m
    # Columns behind the last one repeat it; their results are not stored.
    clipped = tl.minimum(column, n - 1)
    if OVERLAP:
        if FETCH_PIECES > 0:
            piece = first_column.to(tl.int64) * k + tl.arange(0, FETCH_PIECES) * FETCH_WIDTH
            last = (n * (2 if GATED else 1)).to(tl.int64) * k - FETCH_WIDTH
            pieces = weight_ptr + tl.minimum(piece, last)
            tl.inline_asm_elementwise(FETCH, "=r,l", [pieces], dtype=tl.int32, is_pure=False, pack=1)
            if GATED:
                pieces = weight_ptr + tl.minimum(piece + n.to(tl.int64) * k, last)
                tl.inline_asm_elementwise(FETCH, "=r,l", [pieces], dtype=tl.int32, is_pure=False, pack=1)
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()

    part = split[:, None, None] * DEPTH + at[None, None, :]
    x_ptr += row[None, :, None] * x_stride + part
    weight_ptr += clipped[None, :, None].to(tl.int64) * k + part
    up_ptr = weight_ptr + n.to(tl.int64) * k
    acc = tl.zeros([SPLITS, ROWS, COLUMNS], tl.float32)
    acc_up = tl.zeros([SPLITS, ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([SPLITS, ROWS], tl.float32)
    whole: tl.constexpr = k % (SPLITS * DEPTH) == 0
    for first in tl.range(0, k, SPLITS * DEPTH, num_stages=STAGES):
        if whole:
            x = tl.load(x_ptr + first, mask=valid_row[None, :, None], other=0.0)
            w = tl.load(weight_ptr + first)
        else:
            inside = first + part < k
            x = tl.load(x_ptr + first, mask=valid_row[None, :, None] & inside, other=0.0)
            w = tl.load(weight_ptr + first, mask=inside, other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, 2)
            scale = tl.load(scale_ptr + first + part, mask=first + part < k, other=0.0)
            x = (wide * scale).to(x_ptr.dtype.element_ty)
        acc = tl.dot(x, tl.permute(w, (0, 2, 1)), acc, input_precision="ieee")
        if GATED:
            w_up = tl.load(up_ptr + first) if whole else tl.load(up_ptr + first, mask=inside, other=0.0)
            acc_up = tl.dot(x, tl.permute(w_up, (0, 2, 1)), acc_up, input_precision="ieee")
    mean_square = tl.sum(squares, 0) / k
    mask = valid_row[:, None] & (column < n)[None, :]
    y = _finish(tl.sum(acc, 0), tl.sum(acc_up, 0), mean_square[:, None], eps, gate_scale, NORM, GATED)
    if ADD:
        add_ptr += row[:, None] * add_stride + column[None, :]
        y += tl.load(add_ptr, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row[:, None] * n + column[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)


def tiles_for(rows: int, n: int, k: int, *, gated: bool, width: int) -> Tiles:
    """Tiles of a product of `rows` rows with [n, k] (twice that if `gated`), elements of `width` bytes."""
    if rows == 1:
        depth = min(triton.next_power_of_2(k), 4096)
        return Tiles(1, max(1, 4096 // depth), depth, 1, 4, 1)
    block = 16 if rows <= 16 else 32 if rows <= 32 else 64
    return Tiles(block, 16, 64, 4, 4, 3)


def fetch_plan(tiles: Tiles, k: int, width: int) -> tuple[str, int, int]:
    """The instruction with which each thread asks L2 for its piece of a program's weight rows; its elements;
    the number of pieces, which are a power of two. Pieces are multiples of 16 bytes, at most 16 KiB."""
    total = tiles.columns * k * width
    pieces = tiles.warps * 32
    size = total // pieces
    if total % pieces or size % 16 or size > 16384:
        return "", 1, 0
    return f"cp.async.bulk.prefetch.L2.global [$1], {size}; // $0", size // width, pieces


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
    tiles: Tiles | None = None,
    overlap: bool | None = None,
) -> Tensor:
    """y = f(norm(x) Wᵀ) + add, [M, N] in `out_dtype`, None: x's.

    x: [M, K], rows dense; weight: [N, K] dense, or [2 N, K] = [gate | up] if `gated`, where
    f = silu(gate_scale · gate) · up; both of one dtype. scale: [K] fp32, the factor of an RMS norm with `eps`
    before the product (None: no norm). add: [M, N]. fp32 inside, rounded once at the end, the normed rows of
    bf16 once before the product as well if M > 1. fp32 products are exact fp32 (no TF32).
    """
    m, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    assert x.stride(1) == 1 and weight.is_contiguous() and weight.shape[1] == k and x.dtype == weight.dtype
    assert add is None or (add.shape == (m, n) and add.stride(1) == 1)
    tiles = tiles or tiles_for(m, n, k, gated=gated, width=x.element_size())
    overlap = overlaps(x.device) if overlap is None else overlap
    out = torch.empty(m, n, dtype=out_dtype or x.dtype, device=x.device)
    flags = {"NORM": scale is not None, "GATED": gated, "ADD": add is not None, "OVERLAP": overlap}
    launch = {"num_warps": tiles.warps} | ({"launch_pdl": True} if overlap else {})
    add_stride = 0 if add is None else add.stride(0)
    common = (x, x.stride(0), weight, scale, add, add_stride, out)
    if tiles.rows == 1:
        grid = (triton.cdiv(n, tiles.columns), m)
        _one_row[grid](
            *common, n, eps, gate_scale, k=k, COLUMNS=tiles.columns, DEPTH=tiles.depth, **flags, **launch
        )
        return out
    fetch, width, pieces = fetch_plan(tiles, k, x.element_size()) if overlap else ("", 1, 0)
    grid = (triton.cdiv(n, tiles.columns), triton.cdiv(m, tiles.rows))
    _few_rows[grid](
        *common,
        m,
        n,
        eps,
        gate_scale,
        k=k,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        DEPTH=tiles.depth,
        SPLITS=tiles.splits,
        STAGES=tiles.stages,
        FETCH=fetch,
        FETCH_WIDTH=width,
        FETCH_PIECES=pieces,
        **flags,
        **launch,
    )
    return out
