"""How far each token of an SSD layer lets the past fade, summed up along the chunks of a `ChunkTable`.

Owns softplus and limits of Δ, and the sums that `accumulation_chunks` takes differences of: as in
`denim.recurrence.decay` no exponent of a decay is positive. Logs are to base 2, the exponential of a GPU.

A token's log-decay is taken as at least LEAST_LOG_DECAY: what remains of the past then is below 1e-17 of it,
and the sums stay small enough for fp32 to tell tokens apart behind one that forgets all.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.kernels.exponentials import LOG2_E, exp, softplus

LEAST_LOG_DECAY = tl.constexpr(-40.0)
# Heads of a program, and its warps.
HEADS, WARPS = 16, 4


class TimeStep(NamedTuple):
    """What makes Δ of an SSD layer: softplus(dt + bias), clamped to `limit`, its least and largest value.

    dt: [T, H], rows any distance apart; bias: [H] fp32.
    """

    dt: Tensor
    bias: Tensor
    limit: tuple[float, float] = (0.0, inf)


@triton.jit(do_not_specialize=["total"])  # a number of tokens is as good as another: no kernel of its own
def _decays(
    dt_ptr,
    dt_stride,
    bias_ptr,
    least,
    most,
    a_log_ptr,
    chunks_ptr,
    since_ptr,
    onto_ptr,
    total,
    heads: tl.constexpr,
    tokens: tl.constexpr,
    block: tl.constexpr,
):
    if tl.load(chunks_ptr + tl.program_id(0) * 3) < 0:
        return
    row = tl.load(chunks_ptr + tl.program_id(0) * 3 + 1).to(tl.int64)
    step = tl.arange(0, tokens)
    head = tl.program_id(1) * block + tl.arange(0, block)
    real = head < heads
    live = (step < tl.load(chunks_ptr + tl.program_id(0) * 3 + 2))[:, None] & real[None, :]
    dt = tl.load(dt_ptr + row * dt_stride + step[:, None] * dt_stride + head[None, :], mask=live, other=0.0)
    dt = dt.to(tl.float32) + tl.load(bias_ptr + head, mask=real, other=0.0)[None, :]
    delta = tl.minimum(tl.maximum(softplus(dt), least), most)
    rate = -exp(tl.load(a_log_ptr + head, mask=real, other=0.0))
    log_decay = tl.where(live, tl.maximum(rate[None, :] * delta, LEAST_LOG_DECAY), 0.0) * LOG2_E
    since = tl.cumsum(log_decay, 0)
    at = row + head[None, :].to(tl.int64) * total + step[:, None]
    tl.store(since_ptr + at, since, mask=live)
    tl.store(onto_ptr + at, since - tl.log2(delta), mask=live)


def decays_of(step: TimeStep, a_log: Tensor, table: ChunkTable, heads: int) -> Tensor:
    """since and onto, [2, H, T] fp32: G_t and G_t - log2 Δ_t, G_t being the sum of Δ A log2 e over tokens of
    t's chunk up to t, A = -exp(a_log). So exp2(since_t - onto_s) is Δ_s times the decay from s to t."""
    tokens = len(step.dt)
    decays = torch.empty(2, heads, tokens, dtype=torch.float32, device=step.dt.device)
    _decays[(len(table.chunks), triton.cdiv(heads, HEADS))](
        step.dt,
        step.dt.stride(0),
        step.bias,
        *step.limit,
        a_log,
        table.chunks,
        *decays,
        tokens,
        heads=heads,
        tokens=max(16, triton.next_power_of_2(table.size)),
        block=HEADS,
        num_warps=WARPS,
    )
    return decays
