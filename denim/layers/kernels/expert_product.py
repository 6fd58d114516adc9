"""Products of rows with the weights of the experts that they chose, on CUDA, without asking the device.

Rows are sorted by expert (`denim.layers.kernels.expert_choices`); a program takes a tile of rows of one
expert. Which expert that is it works out from the sorted order itself, so the launch depends on sizes that
the host knows and can be captured.

Weights may be FP8 in blocks with one scale each: a tile lies within one block, so its product is that of the
FP8 numbers, which bf16 holds exactly, times one number. Activations are not rounded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from denim.layers.kernels.expert_choices import Choices

# The side of a block of FP8 weights; columns and depth of a tile divide it.
BLOCK = 128
# Programs below which tiles are cut narrower: two for each processor of an H200.
FULL = 264


@triton.jit
def _expert_product(
    x_ptr,
    x_stride,
    weight_ptr,
    scales_ptr,
    factor_ptr,
    order_ptr,
    starts_ptr,
    out_ptr,
    n,
    top_k,
    k: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GATED: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    SCALED: tl.constexpr,
):
    # The tiles of expert 0 come first, then those of expert 1, ...: find this program's in that row.
    tile = tl.program_id(1)
    e = tl.arange(0, EXPERT_BLOCK)
    start = tl.load(starts_ptr + e, mask=e < EXPERTS, other=0)
    end = tl.load(starts_ptr + 1 + e, mask=e < EXPERTS, other=0)
    tiles = (end - start + ROWS - 1) // ROWS
    tiles_end = tl.cumsum(tiles, 0)
    expert = tl.sum((tiles_end <= tile).to(tl.int32), 0)
    if expert >= EXPERTS:
        return
    mine = e == expert
    first = tl.sum(tl.where(mine, start + (tile - (tiles_end - tiles)) * ROWS, 0), 0)
    last = tl.sum(tl.where(mine, end, 0), 0)

    place = first + tl.arange(0, ROWS)
    valid = place < last
    pair = tl.load(order_ptr + place, mask=valid, other=0)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_n = column < n
    at = tl.arange(0, DEPTH)
    if BY_TOKEN:
        x_ptr += (pair // top_k)[:, None] * x_stride + at[None, :]
        out_row = place
    else:
        x_ptr += place[:, None] * x_stride + at[None, :]
        out_row = pair
    rows_of_expert = n * 2 if GATED else n
    weight_row = expert.to(tl.int64) * rows_of_expert + tl.minimum(column, n - 1)
    weight_ptr += weight_row[:, None] * k + at[None, :]
    up_ptr = weight_ptr + n.to(tl.int64) * k
    if SCALED:  # n and k are multiples of BLOCK
        block_row = expert.to(tl.int64) * (rows_of_expert // BLOCK) + tl.program_id(0) * COLUMNS // BLOCK
        scales_ptr += block_row * (k // BLOCK)
        up_scales_ptr = scales_ptr + (n // BLOCK) * (k // BLOCK)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    acc_up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in tl.range(0, k, DEPTH, num_stages=3):
        inside = begin + at < k
        x = tl.load(x_ptr + begin, mask=valid[:, None] & inside[None, :], other=0.0)
        w = tl.load(weight_ptr + begin, mask=inside[None, :], other=0.0)
        if SCALED:
            acc += tl.dot(x, w.to(x.dtype).T, input_precision="ieee") * tl.load(scales_ptr + begin // BLOCK)
        else:
            acc = tl.dot(x, w.T, acc, input_precision="ieee")
        if GATED:
            w_up = tl.load(up_ptr + begin, mask=inside[None, :], other=0.0)
            if SCALED:
                product = tl.dot(x, w_up.to(x.dtype).T, input_precision="ieee")
                acc_up += product * tl.load(up_scales_ptr + begin // BLOCK)
            else:
                acc_up = tl.dot(x, w_up.T, acc_up, input_precision="ieee")
    if GATED:
        acc = acc * tl.sigmoid(acc) * acc_up
    if not BY_TOKEN:
        acc *= tl.load(factor_ptr + pair, mask=valid, other=0.0)[:, None]
    out_ptr += out_row[:, None] * n + column[None, :]
    tl.store(out_ptr, acc.to(out_ptr.dtype.element_ty), mask=valid[:, None] & in_n[None, :])


def _launch(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    choices: Choices,
    factors: Tensor | None,
    gated: bool,
) -> Tensor:
    experts, rows, k = weight.shape
    n = rows // 2 if gated else rows
    pairs = len(choices.order)
    assert x.stride(1) == 1 and x.shape[1] == k and weight.is_contiguous()
    if scales is None:
        assert x.dtype == weight.dtype
    else:
        assert n % BLOCK == k % BLOCK == 0 and scales.shape == (experts, rows // BLOCK, k // BLOCK)
        assert scales.is_contiguous()
    tile = min(max(triton.next_power_of_2(pairs // experts), 16), 64)
    tiles = min(pairs, pairs // tile + min(experts, pairs))  # each expert leaves one incomplete at most
    columns = 64 if triton.cdiv(n, 64) * tiles >= FULL else 16
    out = torch.empty(pairs, n, dtype=x.dtype, device=x.device)
    _expert_product[(triton.cdiv(n, columns), tiles)](
        x,
        x.stride(0),
        weight,
        scales,
        factors,
        choices.order,
        choices.starts,
        out,
        n,
        choices.top_k,
        k=k,
        BLOCK=BLOCK,
        EXPERTS=experts,
        EXPERT_BLOCK=triton.next_power_of_2(experts),
        ROWS=tile,
        COLUMNS=columns,
        DEPTH=128 if tile < 64 and x.element_size() == 2 else 64,
        GATED=gated,
        BY_TOKEN=factors is None,
        SCALED=scales is not None,
    )
    return out


def expert_inner(
    x: Tensor, weight: Tensor, choices: Choices, *, gated: bool, scales: Tensor | None = None
) -> Tensor:
    """x[token] W[expert]ᵀ of every pair, in the order of `choices.order`.

    x: [T, K]; weight: [E, N, K], or [E, 2 N, K] = [gate | up] by rows if `gated`, where the result is
    silu(gate) · up. `scales`: [E, N / 128, K / 128] (2 N if gated) fp32 of a weight in FP8 blocks. fp32
    inside. Returns [P, N] in x's dtype.
    """
    return _launch(x, weight, scales, choices, None, gated)


def expert_outer(
    inner: Tensor, weight: Tensor, choices: Choices, weights: Tensor, *, scales: Tensor | None = None
) -> Tensor:
    """The weighed sum over each token's choices of inner W[expert]ᵀ.

    inner: [P, K] in the order of `choices.order`; weight: [E, N, K]; weights: [T, top_k] fp32; scales: as in
    `expert_inner`. Returns [T, N] in inner's dtype; each summand is rounded to it, their sum is made in fp32.
    """
    pairs = _launch(inner, weight, scales, choices, weights.contiguous(), False)
    return pairs.view(-1, choices.top_k, pairs.shape[1]).sum(1)
