"""The product of 2 to 64 rows with a weight on tensor cores: y = f(x Wᵀ) + add.

A program takes all rows and a few columns. Where the columns alone make too few programs, several share a
tile, each with its part of K: they leave their sums in memory, and the last to arrive adds them up, always in
the same order. It finds the counter at zero and leaves it at zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from denim.recurrence.kernels.overlap import launch_options


@triton.jit
def _few_rows(
    x_ptr,
    x_stride,
    weight_ptr,
    add_ptr,
    add_stride,
    out_ptr,
    partial_ptr,
    arrivals_ptr,
    m,
    n,
    gate_scale,
    k: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    SWAPPED: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl_cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.arange(0, ROWS)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, DEPTH)
    # Rows of the weight: gate and up of a column lie side by side. Columns behind the last repeat it.
    wide: tl.constexpr = COLUMNS * 2 if GATED else COLUMNS
    lane = tl.arange(0, wide)
    if GATED:
        weight_row = tl.minimum(tile * COLUMNS + lane // 2, n - 1) + lane % 2 * n
    else:
        weight_row = tl.minimum(column, n - 1)
    weight_ptr += weight_row[:, None].to(tl.int64) * k
    part: tl.constexpr = tl.cdiv(tl.cdiv(k, DEPTH), SPLITS) * DEPTH
    first = split * part
    last = tl.minimum(first + part, k)
    if OVERLAP:
        tl_cuda.gdc_wait()

    in_rows = row < m
    x_ptr += row[:, None] * x_stride + at[None, :]
    weight_ptr += at[None, :]
    acc = tl.zeros([wide, ROWS] if SWAPPED else [ROWS, wide], tl.float32)
    for begin in tl.range(first, last, DEPTH, num_stages=STAGES):
        if k % DEPTH == 0:
            x = tl.load(x_ptr + begin, mask=in_rows[:, None], other=0.0)
            w = tl.load(weight_ptr + begin)
        else:
            inside = (begin + at < k)[None, :]
            x = tl.load(x_ptr + begin, mask=in_rows[:, None] & inside, other=0.0)
            w = tl.load(weight_ptr + begin, mask=inside, other=0.0)
        if SWAPPED:
            acc = tl.dot(w, x.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(x, w.T, acc, input_precision="ieee")
    if SWAPPED:
        acc = acc.T

    if SPLITS > 1:
        partial_ptr += tile * (SPLITS * ROWS * wide) + row[:, None] * wide + lane[None, :]
        tl.store(partial_ptr + split * (ROWS * wide), acc, mask=in_rows[:, None])
        tl.debug_barrier()  # the counter stands for the stores of all threads
        if tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.store(arrivals_ptr + tile, 0)
        acc = tl.zeros([ROWS, wide], tl.float32)
        for i in tl.static_range(SPLITS):
            # From L2: the others' sums were never in this processor's own cache.
            acc += tl.load(
                partial_ptr + i * (ROWS * wide), mask=in_rows[:, None], other=0.0, cache_modifier=".cg"
            )
    if GATED:
        gate, up = tl.split(tl.reshape(acc, (ROWS, COLUMNS, 2)))
        gate *= gate_scale
        acc = gate * tl.sigmoid(gate) * up
    mask = in_rows[:, None] & (column < n)[None, :]
    if ADD:
        add_ptr += row[:, None] * add_stride + column[None, :]
        acc += tl.load(add_ptr, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row[:, None] * n + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


def launch_few_rows(
    x: Tensor,
    weight: Tensor,
    add: Tensor | None,
    out: Tensor,
    arrivals: Tensor | None,
    *,
    gated: bool,
    gate_scale: float,
    rows: int,
    columns: int,
    depth: int,
    splits: int,
    swapped: bool,
    warps: int,
    stages: int,
    overlap: bool,
) -> None:
    """x: [M, K], M ≤ `rows`; other arguments as of `small_product`.

    A program takes `columns` columns of y and one of `splits` parts of K, `depth` at a time; `swapped`:
    computed as W xᵀ. splits > 1 needs `arrivals`.
    """
    m, k = x.shape
    n = out.shape[1]
    tiles = triton.cdiv(n, columns)
    partial = None
    if splits > 1:
        assert arrivals is not None and tiles <= len(arrivals)
        wide = columns * 2 if gated else columns
        partial = torch.empty(tiles * splits * rows * wide, dtype=torch.float32, device=x.device)
    _few_rows[(tiles, splits)](
        x,
        x.stride(0),
        weight,
        add,
        0 if add is None else add.stride(0),
        out,
        partial,
        arrivals if splits > 1 else None,
        m,
        n,
        gate_scale,
        k=k,
        ROWS=rows,
        COLUMNS=columns,
        DEPTH=depth,
        SPLITS=splits,
        STAGES=stages,
        SWAPPED=swapped,
        GATED=gated,
        ADD=add is not None,
        OVERLAP=overlap,
        num_warps=warps,
        **launch_options(overlap),
    )
