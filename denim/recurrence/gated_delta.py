"""The delta rule without, with scalar and with vector decay: token by token, by one step, and by chunks.

Owns the arithmetic of one rule, and nothing else. Knows tensors of packed sequences and their states.
Must not know of models, projections or slots; callers normalise q and k (see `l2norm`).

The rule
========
A head keeps a matrix S of shape [d_v, d_k] that maps a key to the value stored under it. A token with
query q, key k, value v, decay alpha = exp(log_decay) in (0, 1] and writing strength beta does

    S'  = S diag(alpha)                    everything fades
    u   = beta (v - S' k)                  what S' says under k is wrong by v - S' k; correct a part of it
    S   = S' + u k^T                       write the correction under k
    o   = S q                              read

In one line S_t = S_{t-1} diag(alpha_t) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T. The state lies [d_v, d_k],
the transpose of the papers' form. By the shape of alpha this is

    none, alpha = 1      DeltaNet           arXiv 2406.06484
    one per head         Gated DeltaNet     arXiv 2412.06464
    one per key channel  KDA (Kimi Linear)  arXiv 2510.26692

With k of length 1, beta = 1 replaces what is stored under k, and beta in (1, 2) overshoots: I - beta k k^T
then has the eigenvalue 1 - beta < 0 along k (arXiv 2411.12537; OLMo-hybrid). Nothing below depends on that.

By chunks
=========
Let S_0 be the state before a chunk of C tokens, t = 1..C, and G_t = sum of log_decay over tokens 1..t of
the chunk, a number or one for each key channel. Write a x for the product of each channel's own factor a_c
with x_c, and <a, b> for the sum over channels. Everything below follows from the four lines above.

1.  Unroll S_t = S_{t-1} diag(alpha_t) + u_t k_t^T:

        S_t = S_0 diag(e^{G_t}) + sum_{s<=t} u_s (e^{G_t - G_s} k_s)^T

2.  S'_t = S_{t-1} diag(alpha_t) is the same sum without its last term (s < t). Put it into u_t:

        u_t + beta_t sum_{s<t} <k_t, e^{G_t - G_s} k_s> u_s  =  beta_t v_t - beta_t S_0 (e^{G_t} k_t)

3.  With u_t, v_t, k_t as the rows of U, V, K, and e^G K for the rows e^{G_t} k_t, this is one unit lower
    triangular system:

        (I + A) U = diag(beta) V - diag(beta) (e^G K) S_0^T,     A_ts = beta_t <k_t, e^{G_t - G_s} k_s>, s < t

    S_0 is not known before the chunks in front are done, but it enters linearly. So solve for its factor
    and for the rest, for all chunks in parallel (the papers' WY form):

        X = (I + A)^-1 diag(beta) V,    W = (I + A)^-1 diag(beta) (e^G K),    and then   U = X - W S_0^T

4.  Read o_t = S_t q_t with the sum of step 1:

        O = (e^G Q) S_0^T + M U,                                 M_ts = <q_t, e^{G_t - G_s} k_s>, s <= t

5.  The state behind the chunk is S_C:

        S_C = S_0 diag(e^{G_C}) + U^T (e^{G_C - G} K)

A and M are products of tokens through the decay between them: `decay` has them, e^G and e^{G_C - G}, and says
why no exponent is positive. Only U and S_C have to be computed chunk after chunk (`chunk_pass`); everything
else, O too, is done for many chunks together. A padded token has beta = 0, log_decay = 0 and k = q = v = 0;
then u = 0, and S_C is the state behind the last real token.
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

L2NORM_EPS = 1e-6  # transformers' and fla's l2norm


def l2norm(x: Tensor, eps: float = L2NORM_EPS) -> Tensor:
    """x / sqrt(sum of x^2 over the last dimension + eps), in x's dtype. Qwen3.5 does this to q and k."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def gated_delta_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    *,
    cu_seqlens: Sequence[int] | Tensor,
    initial_state: Tensor | None = None,
    states_at: Sequence[Sequence[int]] | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The rule token by token, as the module docstring states it. The reference for the other forms.

    q, k: [T, Hk, d_k]; v: [T, Hv, d_v]; log_decay: <= 0 (-inf forgets all), [Hv] for a
    constant, [T, Hv] or [T, Hv, d_k], None for no decay; beta: [T, Hv]. T counts the tokens of N sequences
    that lie one behind the other. Value head i uses key head i // (Hv / Hk). cu_seqlens, initial_state
    [N, Hv, d_v, d_k] and states_at: see `denim.recurrence.sequences`. scale is applied to q; None means
    d_k ** -0.5.

    Returns out [T, Hv, d_v] in v's dtype, and the states behind the sequences [N, Hv, d_v, d_k], or those
    at states_at [P, Hv, d_v, d_k]. The arithmetic and the states are fp32, or float64 if v is. ValueError for
    operands that do not fit each other.
    """
    check_matrix_operands(q, k, v, log_decay, scale, beta=(beta, "T Hv"))
    offsets = offsets_of(cu_seqlens, len(q))
    positions = positions_of(states_at, offsets)
    starting = starting_states(initial_state, len(positions), (*v.shape[1:], k.shape[-1]), v)
    work = work_dtype(v)
    group = v.shape[1] // k.shape[1]
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    q = (q.to(work) * scale).repeat_interleave(group, 1)
    k = k.to(work).repeat_interleave(group, 1)
    alpha = per_token(log_decay, len(q), v).to(work).exp().unsqueeze(2)  # [T, Hv, 1, 1 or d_k]
    strength, value = beta.to(work).unsqueeze(-1), v.to(work)

    def advance(state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        state = state * alpha[t]
        wrong = value[t] - torch.einsum("hvk,hk->hv", state, k[t])
        state = state + torch.einsum("hv,hk->hvk", strength[t] * wrong, k[t])
        return state, torch.einsum("hvk,hk->hv", state, q[t])

    outs, states = token_by_token(advance, starting, offsets, positions)
    return torch.stack(outs).to(v.dtype) if outs else torch.zeros_like(v), states


def gated_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    state: Tensor | Sequence[Tensor],
    scale: float | None = None,
) -> Tensor:
    """One token for each of B sequences; `state` is updated in place. For inference: no gradients.

    q, k: [B, Hk, d_k]; v: [B, Hv, d_v]; beta: [B, Hv]; log_decay: [B, Hv], [B, Hv, d_k], [Hv] or None.
    state: [B, Hv, d_v, d_k] or B tensors [Hv, d_v, d_k] (slots of an arena, say); each row is dense, rows
    may lie anywhere and are not copied. Returns out [B, Hv, d_v] in v's dtype; the arithmetic is in the
    state's dtype, or fp32 if that is narrower. ValueError for operands that do not fit each other.

    The decayed state is read once for k and q together; the output needs no second read of the new state,
    since S q = S' q + u (k . q).
    """
    sizes = check_matrix_operands(q, k, v, log_decay, scale, beta=(beta, "T Hv"))
    blocks = blocks_of(state, (*v.shape, sizes["d_k"]), v)
    if not blocks:
        return torch.empty_like(v)
    if (wide := widened(blocks)) is not None:
        out = gated_delta_step(q, k, v, log_decay, beta, wide, scale)
        write_back(wide, blocks)
        return out

    work, d_k, d_v = blocks[0].dtype, k.shape[2], v.shape[2]
    scale = d_k**-0.5 if scale is None else scale
    per_key = (-1, k.shape[1], v.shape[1] // k.shape[1])  # B, key heads, value heads of each key head
    blocks = [block.view(*per_key, d_v, d_k) for block in blocks]
    size = len(blocks[0])
    alphas: Sequence[Tensor | None] = [None] * len(blocks)
    if log_decay is not None:
        alpha = per_token(log_decay, len(v), v).to(work).exp()
        alphas = alpha.view(*per_key, 1, alpha.shape[2]).split(size)
    kq = torch.stack((k, q), 2).to(work)  # [B, Hk, 2, d_k]

    # k and q as rows before S'^T: as columns behind S' the product takes five times as long on a CPU.
    reads = []
    for block, alpha_i, kq_i in zip(blocks, alphas, kq.split(size), strict=True):
        if alpha_i is not None:
            block.mul_(alpha_i)
        reads.append(torch.bmm(kq_i.view(-1, 2, d_k), block.view(-1, per_key[2] * d_v, d_k).mT))
    read = reads[0] if len(reads) == 1 else torch.cat(reads)
    read_k, read_q = read.view(-1, k.shape[1], 2, per_key[2], d_v).unbind(2)

    key, query = kq.unsqueeze(2).unbind(3)
    u = (v.to(work).view(*per_key, d_v) - read_k) * beta.to(work).view(*per_key, 1)
    out = torch.addcmul(read_q, u, (key * query).sum(-1, keepdim=True)).mul_(scale)
    u, key = u.unsqueeze(-1), key.unsqueeze(-2)
    for block, u_i, key_i in zip(blocks, u.split(size), key.split(size), strict=True):
        block.addcmul_(u_i, key_i)
    return out.view(v.shape).to(v.dtype)


def gated_delta_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    *,
    cu_seqlens: Sequence[int] | Tensor,
    initial_state: Tensor | None = None,
    states_at: Sequence[Sequence[int]] | None = None,
    chunk_size: int = 64,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The rule by chunks of `chunk_size` tokens, any number from 1: arguments, results and errors of
    `gated_delta_recurrent`.

    Differentiable in every tensor argument; time and memory (saved for the backward pass too) are linear
    in T. Sequences of one length are packed by reshaping alone (and padding to whole chunks); unequal
    ones are scattered to chunks once. A cu_seqlens on a GPU costs a synchronisation: pass a list.
    """
    check_matrix_operands(q, k, v, log_decay, scale, beta=(beta, "T Hv"))
    return by_chunks(
        _chunk_terms,
        q,
        k,
        v,
        per_token(log_decay, len(q), v),
        beta.unsqueeze(-1),
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        states_at=states_at,
        chunk_size=chunk_size,
        scale=scale,
    )


def _chunk_terms(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> ChunkTerms:
    """Step 3 of the module docstring, and the factors of steps 4 and 5, in the names used there."""
    # [chunks, Hk, Hv / Hk, ...]; later one batch dimension B of chunks x Hv.
    q, k = q.unsqueeze(2), k.unsqueeze(2)
    log_decay = log_decay.unflatten(1, (k.shape[1], -1))
    fading = fade((q, k), k, log_decay)
    m, a = (scores.flatten(0, 2) for scores in fading.scores)
    beta = beta.flatten(0, 1)  # [B, C, 1]

    # The solver takes the diagonal as 1 and reads nothing above it. It is as exact as substitution, which
    # series of powers of A are not (equal keys: binomials), and faster than inverting by blocks, on GPUs too.
    # An inverse and two products are faster than a solve for two wide right sides, and diag(beta) goes into
    # the columns of the small matrix.
    a = a * beta
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    inverse = torch.linalg.solve_triangular(a, eye.expand_as(a), upper=False, unitriangular=True)
    inverse = inverse * beta.mT
    return ChunkTerms(
        q=(q * fading.since).flatten(0, 2),
        scores=m,
        x=torch.bmm(inverse, v.flatten(0, 1)),
        w=torch.bmm(inverse, (k * fading.since).flatten(0, 2)),
        k=(k * fading.until).flatten(0, 2),
        left=fading.left.flatten(0, 2),
        keys=k,
        log_decay=log_decay,
    )
