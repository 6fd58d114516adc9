"""Prefill of KDA by chunks: gates, the matrices inside each chunk, and the pass over the chunks.

Owns, for a decay per key channel, step 3 of `denim.recurrence.gated_delta`: `_fade` makes beta, the
log-decays' sums, and keys and queries as the pass wants them, faded; `_solve` makes T of `delta_walk` of the
products of `faded_products`. On Hopper `hopper_kimi_chunks` makes all of that where it suits. Knows the
layout of the convolved rows; the walk from chunk to chunk is `delta_pass`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.decay import MIN_LOG_DECAY
from denim.recurrence.kernels.delta_pass import (
    ChunkTerms,
    PassPlan,
    delta_pass,
    largest_chunk,
    plan_of,
)
from denim.recurrence.kernels.delta_walk import TABLE
from denim.recurrence.kernels.exponentials import LOG2_E, SOFTPLUS_LINEAR, softplus
from denim.recurrence.kernels.faded_products import faded_products
from denim.recurrence.kernels.hopper import on_hopper
from denim.recurrence.kernels.triangular import inverse_of_unit_lower

CHANNELS = 32  # that a program of `_fade` takes: 64 bytes of a row


@triton.jit(do_not_specialize_on_alignment=TABLE)
def _fade(
    rows_ptr,
    row_stride,
    f_ptr,
    f_stride,
    b_ptr,
    b_stride,
    a_log_ptr,
    dt_bias_ptr,
    chunks_ptr,
    sums_ptr,
    keys_ptr,
    queries_ptr,
    later_ptr,
    strength_ptr,
    left_ptr,
    floor,
    heads: tl.constexpr,
    key_dim: tl.constexpr,
    size: tl.constexpr,
    width: tl.constexpr,
    least: tl.constexpr,
    exact: tl.constexpr,
):
    """beta; of `width` channels sums of a chunk's log-decays (base 2), and keys and queries faded by them."""
    place = tl.program_id(0).to(tl.int64)
    chunk = place // heads
    head = tl.program_id(0) % heads
    sequence = tl.load(chunks_ptr + chunk * 3)
    first = tl.load(chunks_ptr + chunk * 3 + 1).to(tl.int64)
    count = tl.load(chunks_ptr + chunk * 3 + 2)
    if sequence < 0:
        return
    lane = tl.program_id(1) * width + tl.arange(0, width)
    real = lane < key_dim
    channel = head * key_dim + lane
    bias = tl.load(dt_bias_ptr + channel, mask=real, other=0.0)
    rate = tl.exp(tl.load(a_log_ptr + head))
    dtype = rows_ptr.dtype.element_ty
    token = tl.arange(0, size)
    live = (token < count)[:, None] & real[None, :]
    # Runs of four channels, so that fp32 and 16 bits are laid out alike and nothing moves between threads.
    f_at = tl.max_contiguous(token[:, None] * f_stride + channel[None, :], [1, 4])
    source = tl.max_contiguous(token[:, None] * row_stride + channel[None, :], [1, 4])
    target = tl.max_contiguous(token[:, None] * key_dim + lane[None, :], [1, 4])
    f = tl.load(f_ptr + first * f_stride + f_at, mask=live, other=0.0).to(tl.float32)
    f += bias[None, :]
    source_ptr = rows_ptr + first * row_stride
    q = tl.load(source_ptr + source, mask=live, other=0.0).to(tl.float32)
    k = tl.load(source_ptr + heads * key_dim + source, mask=live, other=0.0).to(tl.float32)
    if floor is not None:
        log_decay = floor * LOG2_E / (1.0 + tl.exp2(f * (-rate * LOG2_E)))
    elif exact:
        log_decay = -rate * softplus(f) * LOG2_E
    else:
        logarithm = tl.log2(1.0 + tl.exp2(tl.minimum(f, SOFTPLUS_LINEAR) * LOG2_E))
        log_decay = -rate * tl.where(f > SOFTPLUS_LINEAR, f * LOG2_E, logarithm)
    log_decay = tl.where(live, tl.maximum(log_decay, least * LOG2_E), 0.0)
    sums = tl.cumsum(log_decay, 0)
    total = tl.sum(log_decay, 0)
    since = tl.exp2(sums)
    until = tl.exp2(tl.minimum(total[None, :] - sums, 0.0))
    place_at = place * (size * key_dim)
    there = real[None, :]
    tl.store(sums_ptr + place_at + target, sums, mask=there)
    tl.store(keys_ptr + place_at + target, (k * since).to(dtype), mask=there)
    tl.store(queries_ptr + place_at + target, (q * since).to(dtype), mask=there)
    tl.store(later_ptr + place_at + target, (k * until).to(dtype), mask=there)
    tl.store(left_ptr + place * key_dim + lane, tl.exp2(total), mask=real)
    if tl.program_id(1) == 0:
        held = token < count
        beta = tl.load(b_ptr + (first + token) * b_stride + head, mask=held, other=0.0).to(tl.float32)
        tl.store(strength_ptr + place * size + token, tl.where(held, tl.sigmoid(beta), 0.0))


@triton.jit(do_not_specialize_on_alignment=TABLE)
def _solve(
    products_ptr,
    chunks_ptr,
    solve_ptr,
    heads: tl.constexpr,
    size: tl.constexpr,
    precision: tl.constexpr,
):
    """T of the products of keys."""
    place = tl.program_id(0).to(tl.int64)
    if tl.load(chunks_ptr + place // heads * 3) < 0:
        return
    token = tl.arange(0, size)
    square = place * (size * size) + token[:, None] * size + token[None, :]
    lower = tl.load(products_ptr + square, mask=token[:, None] > token[None, :], other=0.0)
    solve = inverse_of_unit_lower(lower, size, precision)
    tl.store(solve_ptr + square, solve.to(solve_ptr.dtype.element_ty))


def chunk_terms(
    rows: Tensor,
    b: Tensor,
    f: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    table: ChunkTable,
    heads: int,
    decay_floor: float | None,
    scale: float,
) -> ChunkTerms:
    """What `delta_pass` takes of the chunks; arguments as of `kimi_delta_chunks`."""
    key_dim = f.shape[1] // heads
    size = max(16, triton.next_power_of_2(table.size))
    chunks = len(table.chunks)
    like = {"dtype": rows.dtype, "device": rows.device}
    solve, scores = torch.empty(2, chunks, heads, size, size, **like)
    keys, queries, later = torch.empty(3, chunks, heads, size, key_dim, **like)
    left = torch.empty(chunks, heads, key_dim, dtype=torch.float32, device=rows.device)
    strength = torch.empty(chunks, heads, size, dtype=torch.float32, device=rows.device)
    sums = torch.empty(chunks, heads, size, key_dim, dtype=torch.float32, device=rows.device)
    precision = "ieee" if rows.dtype == torch.float32 else "tf32"
    width = min(CHANNELS, triton.next_power_of_2(key_dim))
    _fade[(chunks * heads, triton.cdiv(key_dim, width))](
        rows,
        rows.stride(0),
        f,
        f.stride(0),
        b,
        b.stride(0),
        a_log,
        dt_bias,
        table.chunks,
        sums,
        keys,
        queries,
        later,
        strength,
        left,
        decay_floor,
        heads=heads,
        key_dim=key_dim,
        size=size,
        width=width,
        least=MIN_LOG_DECAY[torch.float32],
        exact=precision == "ieee",
        num_warps=4,
    )
    products = torch.empty(chunks, heads, size, size, dtype=torch.float32, device=rows.device)
    faded_products(rows, table.chunks, sums, strength, products, scores, scale, precision)
    _solve[(chunks * heads,)](
        products,
        table.chunks,
        solve,
        heads=heads,
        size=size,
        precision=precision,
        num_warps=4,
    )
    return ChunkTerms(solve, scores, keys, queries, later, None, strength, left)


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
    plan: PassPlan | None = None,
) -> Tensor:
    """The delta rule with vector decay over the sequences of `table`; states lie in their slots.

    rows: [T, 2 * H * d_k + H * d_v] = [q | k | v] behind convolution, activation and, for q and k,
    normalisation; b: [T, H]; f: [T, H * d_k]; a_log: [H], dt_bias: [H * d_k], fp32; state: [slots, H, d_v,
    d_k], slots any distance apart. beta = sigmoid(b); log alpha = -exp(a_log) softplus(f + dt_bias), or
    decay_floor * sigmoid(exp(a_log) (f + dt_bias)) (arXiv 2510.26692 and Ling-3.0). q is scaled by
    d_k ** -0.5. table.size is at most `largest_chunk`. plan: how the pass is cut, None: `plan_of`.
    Returns [T, H, d_v] in rows' dtype. bf16 rows: bf16 operands, fp32 sums; fp32 rows: IEEE fp32 throughout.
    """
    heads, value_dim, key_dim = state.shape[1:]
    assert rows.shape[1] == heads * (2 * key_dim + value_dim)
    assert b.shape == (len(rows), heads) and f.shape == (len(rows), heads * key_dim)
    assert rows.stride(1) == 1 and b.stride(1) == 1 and f.stride(1) == 1
    assert table.size <= largest_chunk(rows.dtype)
    scale = key_dim**-0.5
    inputs = (rows, b, f, a_log, dt_bias, table, heads, decay_floor, scale)
    terms = None
    if on_hopper(rows.device):
        from denim.recurrence.kernels.hopper_kimi_chunks import kimi_chunk_terms, suits

        if suits(rows, f, table, state):
            terms = kimi_chunk_terms(*inputs)
    if terms is None:
        terms = chunk_terms(*inputs)
    if plan is None:
        plan = plan_of(table, state, rows.dtype, vector=True)
    return delta_pass(terms, rows[:, 2 * heads * key_dim :], table, state, scale, plan)
