"""The gated delta rule in plain torch: token by token, one step of a batch, and by chunks.

Owns the arithmetic of one rule, and nothing else. Knows tensors of packed sequences and their states.
Must not know of models, projections or slots; callers normalise q and k (see `l2norm`).

The rule
========
A head keeps a matrix S of shape [d_v, d_k] that maps a key to the value stored under it. A token with
query q, key k, value v, decay alpha = exp(log_decay) in (0, 1] and writing strength beta does

    S'  = alpha S                          everything fades
    u   = beta (v - S' k)                  what S' says under k is wrong by v - S' k; correct a part of it
    S   = S' + u k^T                       write the correction under k
    o   = S q                              read

In one line S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T, which is the form of Gated
DeltaNet (arXiv 2412.06464) with the state lying [d_v, d_k]; alpha = 1 gives DeltaNet (arXiv 2406.06484).

By chunks
=========
Let S_0 be the state before a chunk of C tokens, t = 1..C, and G_t = sum of log_decay over tokens 1..t of
the chunk. Everything below follows from the four lines above.

1.  Unroll S_t = alpha_t S_{t-1} + u_t k_t^T:

        S_t = e^{G_t} S_0 + sum_{s<=t} e^{G_t - G_s} u_s k_s^T

2.  S'_t = alpha_t S_{t-1} is the same sum without its last term (s < t). Put it into u_t:

        u_t + beta_t sum_{s<t} e^{G_t - G_s} (k_t . k_s) u_s  =  beta_t v_t - beta_t e^{G_t} S_0 k_t

3.  With u_t, v_t, k_t as the rows of U, V, K this is one unit lower triangular system:

        (I + A) U = diag(beta) V - diag(beta e^G) K S_0^T,     A_ts = beta_t e^{G_t - G_s} (k_t . k_s), s < t

    S_0 is not known before the chunks in front are done, but it enters linearly. So solve for its factor
    and for the rest, for all chunks in parallel (the papers' WY form):

        X = (I + A)^-1 diag(beta) V,    W = (I + A)^-1 diag(beta e^G) K,    and then   U = X - W S_0^T

4.  Read o_t = S_t q_t with the sum of step 1:

        O = diag(e^G) Q S_0^T + M U,                            M_ts = e^{G_t - G_s} (q_t . k_s), s <= t

5.  The state behind the chunk is S_C:

        S_C = e^{G_C} S_0 + U^T diag(e^{G_C - G}) K

Every exponent is a sum of log-decays over tokens behind s up to t, so it is <= 0 and nothing overflows,
however strong the decay. As a difference of two sums its error is |G| 2^-24 in fp32. Only U and S_C have
to be computed chunk after chunk; everything else, O too, is done for many chunks together. A padded token
has beta = 0, log_decay = 0 and k = q = v = 0; then u = 0, and S_C is the state behind the last real token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from denim.recurrence.chunks import ChunkLayout, offsets_of

L2NORM_EPS = 1e-6  # transformers' and fla's l2norm
_CPU_GROUP_BYTES = 1 << 19  # of one packed tensor; about ten are alive, and should stay in the caches
_WORK_DTYPES = (torch.float32, torch.float64)  # states of other dtypes are widened for the arithmetic


def l2norm(x: Tensor, eps: float = L2NORM_EPS) -> Tensor:
    """x / sqrt(sum of x^2 over the last dimension + eps), in x's dtype. Qwen3.5 does this to q and k."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def gated_delta_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Sequence[int] | Tensor,
    initial_state: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The rule token by token, as the module docstring states it. The reference for the other forms.

    q, k: [T, Hk, d_k]; v: [T, Hv, d_v]; log_decay (<= 0, finite), beta: [T, Hv]. T counts the tokens of N
    sequences that lie one behind the other; sequence n is tokens cu_seqlens[n] .. cu_seqlens[n + 1].
    Value head i uses key head i // (Hv / Hk). initial_state: [N, Hv, d_v, d_k], None for zeros.
    scale is applied to q; None means d_k ** -0.5.

    Returns out [T, Hv, d_v] in v's dtype, and the states behind the sequences [N, Hv, d_v, d_k]. The
    arithmetic and the states are fp32, or float64 if v is.
    """
    offsets = offsets_of(cu_seqlens, q.shape[0])
    work = _work_dtype(v)
    group = v.shape[1] // k.shape[1]
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    q = (q.to(work) * scale).repeat_interleave(group, 1)
    k = k.to(work).repeat_interleave(group, 1)
    alpha, strength, value = log_decay.to(work).exp(), beta.to(work), v.to(work)
    outs, states = [], []
    starting = _starting_states(initial_state, len(offsets) - 1, v, k)
    for state, start, end in zip(starting, offsets[:-1], offsets[1:], strict=True):
        for t in range(start, end):
            state = alpha[t, :, None, None] * state
            wrong = value[t] - torch.einsum("hvk,hk->hv", state, k[t])
            state = state + torch.einsum("hv,hk->hvk", strength[t, :, None] * wrong, k[t])
            outs.append(torch.einsum("hvk,hk->hv", state, q[t]))
        states.append(state)
    out = torch.stack(outs).to(v.dtype) if outs else torch.zeros_like(v)
    return out, torch.stack(states)


def gated_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | Sequence[Tensor],
    scale: float | None = None,
) -> Tensor:
    """One token for each of B sequences; `state` is updated in place. For inference: no gradients.

    q, k: [B, Hk, d_k]; v: [B, Hv, d_v]; log_decay, beta: [B, Hv]. state: [B, Hv, d_v, d_k] or B tensors
    [Hv, d_v, d_k] (slots of an arena, say); each row is dense, rows may lie anywhere and are not copied.
    Returns out [B, Hv, d_v] in v's dtype.

    The decayed state is read once for k and q together; the output needs no second read of the new state,
    since S q = S' q + u (k . q).
    """
    if isinstance(state, Tensor) and (len(state) == 1 or state.stride(0) == state[0].numel()):
        blocks = [state]
    else:  # rows that lie apart: one product over all of them would copy them
        blocks = [row.unsqueeze(0) for row in state]
    work = blocks[0].dtype
    if work not in _WORK_DTYPES:
        wide = torch.cat(blocks).float()
        out = gated_delta_step(q, k, v, log_decay, beta, wide, scale)
        for block, result in zip(blocks, wide.split(len(blocks[0])), strict=True):
            block.copy_(result)
        return out

    d_k, d_v = k.shape[2], v.shape[2]
    scale = d_k**-0.5 if scale is None else scale
    per_key = (-1, k.shape[1], v.shape[1] // k.shape[1])  # B, key heads, value heads of each key head
    blocks = [block.view(*per_key, d_v, d_k) for block in blocks]
    alpha = log_decay.to(work).exp().view(*per_key, 1, 1)
    kq = torch.stack((k, q), 2).to(work)  # [B, Hk, 2, d_k]

    # k and q as rows before S'^T: as columns behind S' the product takes five times as long on a CPU.
    size = len(blocks[0])
    reads = []
    for block, alpha_i, kq_i in zip(blocks, alpha.split(size), kq.split(size), strict=True):
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
    log_decay: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Sequence[int] | Tensor,
    initial_state: Tensor | None = None,
    chunk_size: int = 64,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The rule by chunks of `chunk_size` tokens: arguments and results of `gated_delta_recurrent`.

    Differentiable in every tensor argument; time and memory (saved for the backward pass too) are linear
    in T. Sequences of one length are packed by reshaping alone (and padding to whole chunks); unequal
    ones are scattered to chunks once. A cu_seqlens on a GPU costs a synchronisation: pass a list.
    """
    offsets = offsets_of(cu_seqlens, q.shape[0])
    work = _work_dtype(v)
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    layout = ChunkLayout.of(offsets, chunk_size, q.device)
    state = _starting_states(initial_state, layout.sequences, v, k)
    if not layout.active:  # no tokens at all
        return torch.zeros_like(v), state.clone()

    # [chunks, heads, C, d] and, for the gates, [chunks, heads, C].
    packed = [layout.pack(x, work) for x in (q, k, v, log_decay, beta)]
    at_once = max(1, _CPU_GROUP_BYTES // packed[2][:1].nbytes) if v.is_cpu else len(packed[2])
    groups = layout.groups(at_once)
    pieces = zip(*(x.split([sum(group) for group in groups]) for x in packed), strict=True)

    state = state[layout.order]
    outs, finished = [], []
    for active, piece in zip(groups, pieces, strict=True):
        out, state, done = _group_of_chunks(state, active, scale, *piece)
        outs.append(out)
        finished += done
    final = torch.cat([state, *reversed(finished)])[layout.inverse_order]
    return layout.unpack(torch.cat(outs)).to(v.dtype), final


def _group_of_chunks(
    state: Tensor,
    active: list[int],
    scale: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Steps 3 to 5 of the module docstring for some neighbouring chunks, in the names used there.

    q, k: [chunks, Hk, C, d_k]; v: [chunks, Hv, C, d_v]; log_decay, beta: [chunks, Hv, C]; state:
    [sequences, Hv, d_v, d_k]. active[i] of the chunks stand at place i of their sequences; a sequence
    without a chunk at some place has ended.

    Returns O [chunks, Hv, C, d_v], the states of the sequences that are active at the last place, and those
    of the sequences that ended before it, the shorter first.
    """
    heads, size = v.shape[1:3]
    group = heads // k.shape[1]
    m = q @ k.mT
    a = k @ k.mT
    if group > 1:
        q, k, m, a = (x.repeat_interleave(group, 1) for x in (q, k, m, a))
    # One batch dimension, chunks x heads, from here on.
    q, k, v, m, a, g, b = (x.flatten(0, 1) for x in (q, k, v, m, a, log_decay.cumsum(-1), beta))
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    decay = (g.unsqueeze(-1) - g.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
    reach = g.exp().unsqueeze(-1)  # e^{G_t}: how much of S_0 is left at token t
    rest = (g[:, -1:] - g).exp().unsqueeze(-1)  # e^{G_C - G_t}: how much of token t is left at the end

    # The solver takes the diagonal as 1 and reads nothing above it. It is as exact as substitution, which
    # series of powers of A are not (equal keys: binomials), and faster than inverting by blocks, on GPUs too.
    # An inverse and two products are faster than a solve for two wide right sides, and diag(beta) goes into
    # the columns of the small matrix.
    eye = torch.eye(size, dtype=q.dtype, device=q.device)
    a = a * decay * b.unsqueeze(-1)
    inverse = torch.linalg.solve_triangular(a, eye.expand_as(a), upper=False, unitriangular=True)
    inverse = inverse * b.unsqueeze(-2)
    x = torch.bmm(inverse, v)
    w = torch.bmm(inverse * reach.mT, k)

    state = state.flatten(0, 1)
    before, corrections, finished = [], [], []
    blocks = [count * heads for count in active]
    by_place = (t.split(blocks) for t in (x, w, k * rest, reach[:, -1:]))
    for x_i, w_i, k_i, left in zip(*by_place, strict=True):
        if len(x_i) < len(state):
            finished.append(state[len(x_i) :])
            state = state[: len(x_i)]
        u = torch.baddbmm(x_i, w_i, state.mT, alpha=-1)
        before.append(state)
        corrections.append(u)
        state = torch.addcmul(torch.bmm(u.mT, k_i), state, left)
    from_state = torch.bmm(q, torch.cat(before).mT)
    from_chunk = torch.bmm(m * (decay * scale), torch.cat(corrections))
    out = torch.addcmul(from_chunk, from_state, reach * scale)
    out, state, *ended = (t.unflatten(0, (-1, heads)) for t in (out, state, *finished))
    return out, state, ended


def _work_dtype(v: Tensor) -> torch.dtype:
    return torch.float64 if v.dtype == torch.float64 else torch.float32


def _starting_states(initial: Tensor | None, sequences: int, v: Tensor, k: Tensor) -> Tensor:
    """[sequences, Hv, d_v, d_k] in the dtype of the arithmetic; v and k are the tokens' [T, heads, d]."""
    if initial is not None:
        return initial.to(_work_dtype(v))
    return v.new_zeros(sequences, *v.shape[1:], k.shape[-1], dtype=_work_dtype(v))
