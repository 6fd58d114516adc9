"""Prefill of Gated DeltaNet by chunks: gates, the matrices inside each chunk, and the pass over the chunks.

Owns, for scalar decay, step 3 of `denim.recurrence.gated_delta`: one program a chunk and value head makes the
gates, T and the scores M diag(beta) of `delta_walk`. Knows the layout of the convolved rows; the walk from
chunk to chunk is `delta_pass`. Every exponent is a sum of log-decays, so <= 0; exponentials are powers of 2,
which GPUs have an instruction for. On Hopper `hopper_delta` takes all of it where it suits.
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
from denim.recurrence.kernels.exponentials import LOG2_E, softplus
from denim.recurrence.kernels.hopper import on_hopper
from denim.recurrence.kernels.triangular import inverse_of_unit_lower


@triton.jit(do_not_specialize_on_alignment=TABLE)
def _inside(
    rows_ptr,
    row_stride,
    a_ptr,
    b_ptr,
    gate_stride,
    a_log_ptr,
    dt_bias_ptr,
    chunks_ptr,
    solve_ptr,
    scores_ptr,
    since_ptr,
    strength_ptr,
    scale,
    beta_limit,
    heads: tl.constexpr,
    group: tl.constexpr,
    key_dim: tl.constexpr,
    size: tl.constexpr,
    block_k: tl.constexpr,
    least: tl.constexpr,
    precision: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    chunk = place // heads
    head = tl.program_id(0) % heads
    sequence = tl.load(chunks_ptr + chunk * 3)
    first = tl.load(chunks_ptr + chunk * 3 + 1).to(tl.int64)
    count = tl.load(chunks_ptr + chunk * 3 + 2)
    if sequence < 0:
        return
    token = tl.arange(0, size)
    live = token < count
    channel = tl.arange(0, block_k)
    mask = live[:, None] & (channel < key_dim)[None, :]
    tile = token[:, None] * row_stride + channel[None, :]
    query_row = rows_ptr + first * row_stride + (head // group) * key_dim
    q = tl.load(query_row + tile, mask=mask, other=0.0)
    k = tl.load(query_row + (heads // group) * key_dim + tile, mask=mask, other=0.0)

    gate = (first + token) * gate_stride + head
    a = tl.load(a_ptr + gate, mask=live, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + gate, mask=live, other=0.0).to(tl.float32)
    a += tl.load(dt_bias_ptr + head).to(tl.float32)
    log_decay = tl.maximum(-tl.exp(tl.load(a_log_ptr + head)) * softplus(a), least)
    log_decay = tl.where(live, log_decay * LOG2_E, 0.0)
    beta = tl.where(live, beta_limit * tl.sigmoid(b), 0.0)
    if precision == "ieee":
        # Two numbers a sum, see `denim.recurrence.decay`.
        exact = tl.cumsum(log_decay.to(tl.float64), 0)
        until = (tl.sum(log_decay.to(tl.float64), 0) - exact).to(tl.float32)
        since = exact.to(tl.float32)
        rest = (exact - since.to(tl.float64)).to(tl.float32)
        between = (since[:, None] - since[None, :]) + (rest[:, None] - rest[None, :])
    else:
        since = tl.cumsum(log_decay, 0)
        until = tl.sum(log_decay, 0) - since
        between = since[:, None] - since[None, :]
    fade = tl.where(token[:, None] >= token[None, :], tl.exp2(between) * beta[None, :], 0.0)
    tl.store(since_ptr + place * size + token, tl.exp2(since))
    tl.store(strength_ptr + place * size + token, beta * tl.exp2(tl.minimum(until, 0.0)))

    square = place * (size * size) + token[:, None] * size + token[None, :]
    scores = tl.dot(q, tl.trans(k), input_precision=precision) * scale
    tl.store(scores_ptr + square, (scores * fade).to(scores_ptr.dtype.element_ty))
    lower = tl.dot(k, tl.trans(k), input_precision=precision) * fade
    solve = inverse_of_unit_lower(lower, size, precision)
    tl.store(solve_ptr + square, solve.to(solve_ptr.dtype.element_ty))


def gated_delta_chunks(
    rows: Tensor,
    b: Tensor,
    a: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    table: ChunkTable,
    state: Tensor,
    key_heads: int,
    *,
    beta_limit: float = 1.0,
    plan: PassPlan | None = None,
) -> Tensor:
    """The gated delta rule over the sequences of `table`; states are read from and written to their slots.

    rows: [T, 2 * Hk * d_k + Hv * d_v] = [q | k | v] behind convolution, activation and, for q and k,
    normalisation; b, a: [T, Hv], rows of one distance; a_log: [Hv] fp32; dt_bias: [Hv]; state: [slots, Hv,
    d_v, d_k], slots any distance apart. beta = beta_limit * sigmoid(b), alpha = exp(-exp(a_log) softplus(a +
    dt_bias)). q is scaled by d_k ** -0.5. table.size is at most `largest_chunk`. plan: how the pass of the
    portable kernels is cut, None: `plan_of`, or the kernels for Hopper where they suit. Returns [T, Hv, d_v]
    in rows' dtype. bf16 rows: bf16 operands, fp32 sums; fp32 rows: IEEE fp32 throughout.
    """
    heads, value_dim, key_dim = state.shape[1:]
    keys = key_heads * key_dim
    assert rows.shape[1] == 2 * keys + heads * value_dim and b.shape == a.shape == (len(rows), heads)
    size = max(16, triton.next_power_of_2(table.size))
    assert (
        rows.stride(1) == 1
        and b.stride() == a.stride()
        and b.stride(1) == 1
        and size <= largest_chunk(rows.dtype)
    )
    if plan is None and on_hopper(rows.device):
        from denim.recurrence.kernels.hopper_delta import hopper_delta, suits

        if suits(rows, table, state):
            inputs = (rows, b, a, a_log, dt_bias, table, state, key_heads)
            return hopper_delta(*inputs, beta_limit=beta_limit)
    scale = key_dim**-0.5
    chunks = len(table.chunks)
    solve = torch.empty(chunks, heads, size, size, dtype=rows.dtype, device=rows.device)
    since = torch.empty(chunks, heads, size, dtype=torch.float32, device=rows.device)
    scores, strength = torch.empty_like(solve), torch.empty_like(since)
    _inside[(chunks * heads,)](
        rows,
        rows.stride(0),
        a,
        b,
        a.stride(0),
        a_log,
        dt_bias,
        table.chunks,
        solve,
        scores,
        since,
        strength,
        scale,
        beta_limit,
        heads=heads,
        group=heads // key_heads,
        key_dim=key_dim,
        size=size,
        block_k=max(16, triton.next_power_of_2(key_dim)),
        least=MIN_LOG_DECAY[torch.float32],
        precision="ieee" if rows.dtype == torch.float32 else "tf32",
        num_warps=4,
    )
    k, q, values = rows[:, keys : 2 * keys], rows[:, :keys], rows[:, 2 * keys :]
    terms = ChunkTerms(solve, scores, k, q, k, since, strength, None)
    if plan is None:
        plan = plan_of(table, state, rows.dtype)
    return delta_pass(terms, values, table, state, scale, plan)
