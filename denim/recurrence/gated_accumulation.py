"""Gated accumulation with every kind of decay: token by token, one step of a batch, and by chunks.

Owns the arithmetic of one rule, and nothing else. Knows tensors of packed sequences and their states.
Must not know of models, projections or slots; callers apply what a model does to q, k and v before.

The rule
========
A head keeps a matrix S of shape [d_v, d_k], the sum of all v k^T so far, in which the past fades. A token
with query q, key k, value v and decay alpha = exp(log_decay) in (0, 1] does

    S  = S diag(alpha) + v k^T
    o  = S q

The state lies [d_v, d_k], the transpose of the papers' form. By the shape of alpha this is

    none, alpha = 1        linear attention                              arXiv 2006.16236
    a constant per head    RetNet, arXiv 2307.08621; lightning attention arXiv 2401.04658 (MiniMax-Text-01)
    one per head           SSD (Mamba2)                                  arXiv 2405.21060
    one per key channel    GLA                                           arXiv 2312.06635

SSD in these names: q = C, k = B (as many key heads as the model has groups), v = delta x, log_decay =
delta A, scale 1; the caller adds D x to the output.

By chunks
=========
Let S_0 be the state before a chunk of C tokens, t = 1..C, and G_t = sum of log_decay over tokens 1..t of
the chunk, a number or one for each key channel. Write a x for the product of each channel's own factor a_c
with x_c, and <a, b> for the sum over channels.

1.  Unroll the rule:

        S_t = S_0 diag(e^{G_t}) + sum_{s<=t} v_s (e^{G_t - G_s} k_s)^T

2.  Read o_t = S_t q_t. With q_t, k_t, v_t as the rows of Q, K, V, and e^G Q for the rows e^{G_t} q_t:

        O = (e^G Q) S_0^T + M V,                                 M_ts = <q_t, e^{G_t - G_s} k_s>, s <= t

3.  The state behind the chunk is S_C:

        S_C = S_0 diag(e^{G_C}) + V^T (e^{G_C - G} K)

M, e^G and e^{G_C - G} are what `decay` computes; it says why no exponent is positive. This is the chunked
delta rule with U = V: what a token writes does not depend on the state. So only S_C is left for the walk from
chunk to chunk (`chunk_pass`). A padded token has k = q = v = 0 and log_decay = 0, and leaves S as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from denim.recurrence.chunk_pass import ChunkTerms, by_chunks
from denim.recurrence.decay import fade, per_token
from denim.recurrence.operands import check_matrix_operands
from denim.recurrence.sequences import offsets_of, positions_of, starting_states, token_by_token, work_dtype
from denim.recurrence.state_rows import blocks_of, widened, write_back


def gated_accumulation_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    *,
    cu_seqlens: Sequence[int] | Tensor,
    initial_state: Tensor | None = None,
    states_at: Sequence[Sequence[int]] | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The rule token by token, as the module docstring states it. The reference for the other forms.

    q, k: [T, Hk, d_k]; v: [T, Hv, d_v]; log_decay: <= 0 (-inf forgets all), [Hv] for a
    constant, [T, Hv] or [T, Hv, d_k], None for no decay. T counts the tokens of N sequences that lie one
    behind the other. Value head i uses key head i // (Hv / Hk). cu_seqlens, initial_state [N, Hv, d_v, d_k]
    and states_at: see `denim.recurrence.sequences`. scale is applied to q; None means d_k ** -0.5.

    Returns out [T, Hv, d_v] in v's dtype, and the states behind the sequences [N, Hv, d_v, d_k], or those
    at states_at [P, Hv, d_v, d_k]. The arithmetic and the states are fp32, or float64 if v is. ValueError for
    operands that do not fit each other.
    """
    check_matrix_operands(q, k, v, log_decay, scale)
    offsets = offsets_of(cu_seqlens, len(q))
    positions = positions_of(states_at, offsets)
    starting = starting_states(initial_state, len(positions), (*v.shape[1:], k.shape[-1]), v)
    work = work_dtype(v)
    group = v.shape[1] // k.shape[1]
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    q = (q.to(work) * scale).repeat_interleave(group, 1)
    k = k.to(work).repeat_interleave(group, 1)
    alpha = per_token(log_decay, len(q), v).to(work).exp().unsqueeze(2)  # [T, Hv, 1, 1 or d_k]
    value = v.to(work)

    def advance(state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        state = state * alpha[t] + torch.einsum("hv,hk->hvk", value[t], k[t])
        return state, torch.einsum("hvk,hk->hv", state, q[t])

    outs, states = token_by_token(advance, starting, offsets, positions)
    return torch.stack(outs).to(v.dtype) if outs else torch.zeros_like(v), states


def gated_accumulation_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor | Sequence[Tensor],
    scale: float | None = None,
) -> Tensor:
    """One token for each of B sequences; `state` is updated in place. For inference: no gradients.

    q, k: [B, Hk, d_k]; v: [B, Hv, d_v]; log_decay: [Hv], [B, Hv], [B, Hv, d_k] or None. state: [B, Hv, d_v,
    d_k] or B tensors [Hv, d_v, d_k] (slots of an arena, say); each row is dense, rows may lie anywhere and
    are not copied. Returns out [B, Hv, d_v] in v's dtype; the arithmetic is in the state's dtype, or fp32 if
    that is narrower. ValueError for operands that do not fit each other.
    """
    sizes = check_matrix_operands(q, k, v, log_decay, scale)
    blocks = blocks_of(state, (*v.shape, sizes["d_k"]), v)
    if not blocks:
        return torch.empty_like(v)
    if (wide := widened(blocks)) is not None:
        out = gated_accumulation_step(q, k, v, log_decay, wide, scale)
        write_back(wide, blocks)
        return out

    work, d_k, d_v = blocks[0].dtype, k.shape[2], v.shape[2]
    per_key = (k.shape[1], v.shape[1] // k.shape[1])  # key heads, value heads of each key head
    size = len(blocks[0])
    query = (q.to(work) * (d_k**-0.5 if scale is None else scale)).unsqueeze(2)  # [B, Hk, 1, d_k]
    key = k.to(work)[:, :, None, None]  # [B, Hk, 1, 1, d_k]
    value = v.to(work).unflatten(1, per_key).unsqueeze(-1)  # [B, Hk, Hv / Hk, d_v, 1]
    alphas: Sequence[Tensor | None] = [None] * len(blocks)
    if log_decay is not None:
        alpha = per_token(log_decay, len(v), v).to(work).exp().unflatten(1, per_key).unsqueeze(-2)
        alphas = alpha.split(size)
    rows = zip(blocks, alphas, query.split(size), key.split(size), value.split(size), strict=True)
    outs = []
    for block, alpha_i, query_i, key_i, value_i in rows:
        s = block.view(-1, *per_key, d_v, d_k)
        if alpha_i is not None:
            s.mul_(alpha_i)
        s.addcmul_(value_i, key_i)
        # q as a row before S^T: as a column behind S the product takes five times as long on a CPU.
        outs.append(torch.bmm(query_i.flatten(0, 1), s.view(-1, per_key[1] * d_v, d_k).mT))
    return torch.cat(outs).view(v.shape).to(v.dtype)


def gated_accumulation_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    *,
    cu_seqlens: Sequence[int] | Tensor,
    initial_state: Tensor | None = None,
    states_at: Sequence[Sequence[int]] | None = None,
    chunk_size: int = 64,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The rule by chunks of `chunk_size` tokens, any number from 1: arguments, results and errors of
    `gated_accumulation_recurrent`.

    Differentiable in every tensor argument; time and memory are linear in T. Sequences of one length are
    packed by reshaping alone; unequal ones are scattered to chunks once. A cu_seqlens on a GPU costs a
    synchronisation: pass a list.
    """
    check_matrix_operands(q, k, v, log_decay, scale)
    return by_chunks(
        _chunk_terms,
        q,
        k,
        v,
        per_token(log_decay, len(q), v),
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        states_at=states_at,
        chunk_size=chunk_size,
        scale=scale,
    )


def _chunk_terms(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> ChunkTerms:
    """The factors of steps 2 and 3 of the module docstring, in the names used there."""
    # [chunks, Hk, Hv / Hk, ...]; later one batch dimension B of chunks x Hv.
    q, k = q.unsqueeze(2), k.unsqueeze(2)
    log_decay = log_decay.unflatten(1, (k.shape[1], -1))
    fading = fade((q,), k, log_decay)
    return ChunkTerms(
        q=(q * fading.since).flatten(0, 2),
        scores=fading.scores[0].flatten(0, 2),
        x=v.flatten(0, 1),
        w=None,
        k=(k * fading.until).flatten(0, 2),
        left=fading.left.flatten(0, 2),
        keys=k,
        log_decay=log_decay,
    )
