"""The product of one row with a weight, in plain multiplications: y = f(norm(x) Wᵀ) + add.

A program owns a few columns. Its first piece of the weight is on the way into registers before the program
waits for x; the norm is computed by every program anew, which is cheaper than a kernel for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from denim.recurrence.kernels.overlap import launch_options


@triton.jit
def _halves(pair):
    """Two bf16 in an int32, the first in its lower half, as fp32."""
    return (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _one_row(
    x_ptr,
    weight_ptr,
    scale_ptr,
    add_ptr,
    out_ptr,
    n,
    eps,
    gate_scale,
    k: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PACKED: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """PACKED: x and the weight are pairs of bf16. They are taken apart behind the wait; taken as bf16, that
    would be done where they are loaded, and the wait would begin only when the weight has arrived."""
    if OVERLAP:
        tl_cuda.gdc_launch_dependents()
    pack: tl.constexpr = 2 if PACKED else 1
    words: tl.constexpr = k // pack
    block: tl.constexpr = DEPTH // pack
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    valid = column < n
    at = tl.arange(0, block)
    # Rows of the weight: gate and up of a column lie side by side, so that one sum serves both.
    wide: tl.constexpr = COLUMNS * 2 if GATED else COLUMNS
    lane = tl.arange(0, wide)
    if GATED:
        weight_row = tl.program_id(0) * COLUMNS + lane // 2
        in_weight = (weight_row < n)[:, None]
        weight_row += lane % 2 * n
    else:
        weight_row = tl.program_id(0) * COLUMNS + lane
        in_weight = (weight_row < n)[:, None]
    weight_ptr += weight_row[:, None].to(tl.int64) * words + at[None, :]
    inside = at < words
    w = tl.load(weight_ptr, mask=in_weight & inside[None, :], other=0)
    if NORM:
        scale = tl.load(scale_ptr + at * pack, mask=inside, other=0.0)
        if PACKED:
            odd_scale = tl.load(scale_ptr + at * pack + 1, mask=inside, other=0.0)
    if OVERLAP:
        tl_cuda.gdc_wait()

    if ADD:
        add = tl.load(add_ptr + column, mask=valid, other=0.0).to(tl.float32)
    acc = tl.zeros([wide, block], tl.float32)
    squares = tl.zeros([block], tl.float32)
    for first in tl.static_range(0, words, block):
        if first > 0:
            inside = first + at < words
            w = tl.load(weight_ptr + first, mask=in_weight & inside[None, :], other=0)
            if NORM:
                scale = tl.load(scale_ptr + (first + at) * pack, mask=inside, other=0.0)
                if PACKED:
                    odd_scale = tl.load(scale_ptr + (first + at) * pack + 1, mask=inside, other=0.0)
        x = tl.load(x_ptr + first + at, mask=inside, other=0)
        if PACKED:
            x, odd_x = _halves(x)
            w, odd_w = _halves(w)
            if NORM:
                squares += x * x + odd_x * odd_x
                x *= scale
                odd_x *= odd_scale
            acc += w * x[None, :] + odd_w * odd_x[None, :]
        else:
            x = x.to(tl.float32)
            if NORM:
                squares += x * x
                x *= scale
            acc += w.to(tl.float32) * x[None, :]
    y = tl.sum(acc, 1)
    if NORM:
        y *= tl.rsqrt(tl.sum(squares, 0) / k + eps)
    if GATED:
        gate, up = tl.split(tl.reshape(y, (COLUMNS, 2)))
        gate *= gate_scale
        y = gate * tl.sigmoid(gate) * up
    if ADD:
        y += add
    tl.store(out_ptr + column, y.to(out_ptr.dtype.element_ty), mask=valid)


def launch_one_row(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    add: Tensor | None,
    out: Tensor,
    *,
    eps: float,
    gated: bool,
    gate_scale: float,
    columns: int,
    depth: int,
    warps: int,
    overlap: bool,
) -> None:
    """x: [1, K]; out: [1, N]; arguments as of `small_product`; a program takes `columns` columns of y,
    `depth` of K at a time."""
    n, k = out.shape[1], x.shape[1]
    packed = x.dtype == torch.bfloat16 and k % 2 == x.storage_offset() % 2 == weight.storage_offset() % 2 == 0
    if packed:
        x, weight = x.view(torch.int32), weight.view(torch.int32)
    _one_row[(triton.cdiv(n, columns),)](
        x,
        weight,
        scale,
        add,
        out,
        n,
        eps,
        gate_scale,
        k=k,
        COLUMNS=columns,
        DEPTH=depth,
        PACKED=packed,
        NORM=scale is not None,
        GATED=gated,
        ADD=add is not None,
        OVERLAP=overlap,
        num_warps=warps,
        **launch_options(overlap),
    )
