"""Prefill of KDA by chunks: gates, the matrices inside each chunk, and the pass over the chunks.

Owns, for a decay per key channel, step 3 of `denim.recurrence.gated_delta`: one program a chunk and head
makes the log-decays, A and M, (I + A)^-1 diag(beta), and keys and queries as the pass wants them, faded.
Knows the layout of the convolved rows; the walk from chunk to chunk is `delta_pass`.

The pairs s < t are parted by halving, as `denim.recurrence.decay` says. A token is at each cut either in a
first half, as a key, or in a second half, as a row; so at a cut whose log-decays sum to R one factor per
token serves both, e^{-|G - R|}, and products of all tokens with all give the pairs that the cut parts, the
rest being masked out. Every exponent is <= 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.decay import MIN_LOG_DECAY
from denim.recurrence.kernels.delta_pass import (
    TABLE,
    ChunkTerms,
    PassPlan,
    delta_pass,
    largest_chunk,
    plan_of,
)
from denim.recurrence.kernels.triangular import inverse_of_unit_lower

SOFTPLUS_LINEAR = 20.0  # above it softplus(x) = x in fp32


@triton.jit(do_not_specialize_on_alignment=TABLE)
def _inside(
    rows_ptr,
    row_stride,
    f_ptr,
    f_stride,
    b_ptr,
    b_stride,
    a_log_ptr,
    dt_bias_ptr,
    chunks_ptr,
    solve_ptr,
    scores_ptr,
    keys_ptr,
    queries_ptr,
    later_ptr,
    left_ptr,
    scale,
    floor,
    heads: tl.constexpr,
    key_dim: tl.constexpr,
    size: tl.constexpr,
    block_k: tl.constexpr,
    least: tl.constexpr,
    linear: tl.constexpr,
    precision: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    chunk = place // heads
    head = tl.program_id(0) % heads
    if tl.load(chunks_ptr + chunk * 3) < 0:
        return
    first = tl.load(chunks_ptr + chunk * 3 + 1).to(tl.int64)
    token = tl.arange(0, size)
    live = token < tl.load(chunks_ptr + chunk * 3 + 2)
    channel = tl.arange(0, block_k)
    real = channel < key_dim
    mask = live[:, None] & real[None, :]
    at = head * key_dim + channel[None, :]

    f = tl.load(f_ptr + first * f_stride + token[:, None] * f_stride + at, mask=mask, other=0.0)
    f = f.to(tl.float32) + tl.load(dt_bias_ptr + at, mask=real[None, :], other=0.0)
    rate = tl.exp(tl.load(a_log_ptr + head))
    if floor is None:
        log_decay = -rate * tl.where(f > linear, f, tl.log(1.0 + tl.exp(tl.minimum(f, linear))))
    else:
        log_decay = floor * tl.sigmoid(rate * f)
    log_decay = tl.where(mask, tl.maximum(log_decay, least), 0.0)
    sums = tl.cumsum(log_decay, 0)
    total = tl.sum(tl.where((token == size - 1)[:, None], sums, 0.0), 0)
    beta = tl.load(b_ptr + (first + token) * b_stride + head, mask=live, other=0.0).to(tl.float32)
    beta = tl.where(live, tl.sigmoid(beta), 0.0)

    dtype = rows_ptr.dtype.element_ty
    source = rows_ptr + first * row_stride + token[:, None] * row_stride + at
    q = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    k = tl.load(source + heads * key_dim, mask=mask, other=0.0).to(tl.float32)
    target = place * (size * key_dim) + token[:, None] * key_dim + channel[None, :]
    since = tl.exp(sums)
    tl.store(keys_ptr + target, (k * since).to(dtype), mask=real[None, :])
    tl.store(queries_ptr + target, (q * since).to(dtype), mask=real[None, :])
    tl.store(later_ptr + target, (k * tl.exp(total[None, :] - sums)).to(dtype), mask=real[None, :])
    tl.store(left_ptr + place * key_dim + channel, tl.exp(total), mask=real)

    row = token[:, None]
    column = token[None, :]
    kk = tl.zeros([size, size], tl.float32)
    qk = tl.where(row == column, tl.sum(q * k, 1)[:, None], 0.0)
    for level in tl.static_range(0, 6):
        if (1 << level) < size:
            cut = tl.arange(0, 2 << level)[None, :, None] == (1 << level) - 1
            halves = tl.reshape(sums, [size >> (level + 1), 2 << level, block_k])
            before = tl.sum(tl.where(cut, halves, 0.0), 1)
            factor = tl.reshape(tl.exp(-tl.abs(halves - before[:, None, :])), [size, block_k])
            key = (k * factor).to(dtype)
            query = (q * factor).to(dtype)
            parted = (row >> (level + 1) == column >> (level + 1)) & (row >> level > column >> level)
            kk += tl.where(parted, tl.dot(key, tl.trans(key), input_precision=precision), 0.0)
            qk += tl.where(parted, tl.dot(query, tl.trans(key), input_precision=precision), 0.0)

    square = place * (size * size) + row * size + column
    tl.store(scores_ptr + square, (qk * scale).to(dtype))
    solve = inverse_of_unit_lower(kk * beta[:, None], size, precision) * beta[None, :]
    tl.store(solve_ptr + square, solve.to(dtype))


def kimi_delta_chunks(
    rows: Tensor,
    b: Tensor,
    f: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    table: ChunkTable,
    state: Tensor,
    *,
    decay_floor: float | None = None,
    scale: float | None = None,
    plan: PassPlan | None = None,
) -> Tensor:
    """The delta rule with vector decay over the sequences of `table`; states lie in their slots.

    rows: [T, 2 * H * d_k + H * d_v] = [q | k | v] behind convolution, activation and, for q and k,
    normalisation; b: [T, H]; f: [T, H * d_k]; a_log: [H], dt_bias: [H * d_k], fp32; state: [slots, H, d_v,
    d_k], slots any distance apart. beta = sigmoid(b); log alpha = -exp(a_log) softplus(f + dt_bias), or
    decay_floor * sigmoid(exp(a_log) (f + dt_bias)) (arXiv 2510.26692 and Ling-3.0). scale is applied to q;
    None means d_k ** -0.5. table.size is at most `largest_chunk`. plan: how the pass is cut, None: `plan_of`.
    Returns [T, H, d_v] in rows' dtype. bf16 rows: bf16 operands, fp32 sums; fp32 rows: IEEE fp32 throughout.
    """
    heads, value_dim, key_dim = state.shape[1:]
    size = max(16, triton.next_power_of_2(table.size))
    assert rows.stride(1) == 1 and b.stride(1) == 1 and f.stride(1) == 1 and size <= largest_chunk(rows.dtype)
    scale = key_dim**-0.5 if scale is None else scale
    chunks = len(table.chunks)
    like = {"dtype": rows.dtype, "device": rows.device}
    solve, scores = torch.empty(2, chunks, heads, size, size, **like)
    keys, queries, later = torch.empty(3, chunks, heads, size, key_dim, **like)
    left = torch.empty(chunks, heads, key_dim, dtype=torch.float32, device=rows.device)
    _inside[(chunks * heads,)](
        rows,
        rows.stride(0),
        f,
        f.stride(0),
        b,
        b.stride(0),
        a_log,
        dt_bias,
        table.chunks,
        solve,
        scores,
        keys,
        queries,
        later,
        left,
        scale,
        decay_floor,
        heads=heads,
        key_dim=key_dim,
        size=size,
        block_k=max(16, triton.next_power_of_2(key_dim)),
        least=MIN_LOG_DECAY[torch.float32],
        linear=SOFTPLUS_LINEAR,
        precision="ieee" if rows.dtype == torch.float32 else "tf32",
        num_warps=8,
    )
    terms = ChunkTerms(solve, scores, keys, queries, later, None, None, left)
    if plan is None:
        plan = plan_of(table, heads, value_dim, rows.dtype, rows.device)
    return delta_pass(terms, rows[:, 2 * heads * key_dim :], table, state, scale, plan)
