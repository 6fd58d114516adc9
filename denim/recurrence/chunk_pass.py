"""The pass over the chunks of a batch, each of them a function of the state before it.

Owns the order of work of a chunked form: packing, groups of chunks, the walk from chunk to chunk, outputs,
and states inside a sequence. Knows `ChunkTerms`; must not know which rule they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from denim.recurrence.chunks import ChunkLayout
from denim.recurrence.sequences import offsets_of, positions_of, repeated_for, starting_states, work_dtype

_CPU_GROUP_BYTES = 1 << 19  # of one packed tensor; about ten are alive, and should stay in the caches


class ChunkTerms(NamedTuple):
    """Some chunks of C tokens of some heads as functions of the state S before them, [B, d_v, d_k]:

        U   = x - w S^T                 what its tokens write (w is None if that does not depend on S)
        O   = q S^T + scores U          its outputs
        S_C = S diag(left) + U^T k      the state behind it

    q, k, w: [B, C, d_k]; scores: [B, C, C]; x: [B, C, d_v]; left: [B, 1, 1 or d_k]. B is chunks x Hv.
    S_t inside a chunk is the S_C of the chunk cut off behind t. That takes the keys before they faded,
    [chunks, Hk, 1, C, d_k], and log_decay, [chunks, Hk, Hv / Hk, C, 1 or d_k].
    """

    q: Tensor
    scores: Tensor
    x: Tensor
    w: Tensor | None
    k: Tensor
    left: Tensor
    keys: Tensor
    log_decay: Tensor


def by_chunks(
    terms_of: Callable[..., ChunkTerms],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *gates: Tensor,
    cu_seqlens: Sequence[int] | Tensor,
    initial_state: Tensor | None,
    states_at: Sequence[Sequence[int]] | None,
    chunk_size: int,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Outputs [T, Hv, d_v] in v's dtype, and the states that `denim.recurrence.sequences` defines.

    q, k: [T, Hk, d_k]; v: [T, Hv, d_v]; gates: each [T, Hv, ...]. scale is applied to the outputs; None
    means d_k ** -0.5. terms_of(q, k, v, *gates) gets some chunks in the dtype of the arithmetic, padded with
    zeros: q, k [chunks, Hk, C, d_k], v [chunks, Hv, C, d_v], gates [chunks, Hv, C, ...].
    """
    offsets = offsets_of(cu_seqlens, len(q))
    positions = positions_of(states_at, offsets)
    starting = starting_states(initial_state, len(positions), (*v.shape[1:], k.shape[-1]), v)
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    layout = ChunkLayout.of(offsets, chunk_size, q.device)
    if not layout.active:  # no tokens at all
        return torch.zeros_like(v), repeated_for(positions, starting)

    packed = [layout.pack(x, work_dtype(v)) for x in (q, k, v, *gates)]
    at_once = max(1, _CPU_GROUP_BYTES // packed[2][:1].nbytes) if v.is_cpu else len(packed[2])
    groups = layout.groups(at_once)
    pieces = zip(*(x.split([sum(group) for group in groups]) for x in packed), strict=True)
    places = [] if states_at is None else layout.places_of(positions)

    state, first = starting[layout.order], 0
    outs, finished, index, inside = [], [], [], []
    for active, piece in zip(groups, pieces, strict=True):
        terms = terms_of(*piece)
        before, u, state, ended = _walk(terms, state, active)
        out = torch.baddbmm(torch.bmm(terms.scores, u), terms.q, before.mT, beta=scale, alpha=scale)
        outs.append(out.unflatten(0, (-1, v.shape[1])))
        finished += ended
        here = [(i, chunk - first, row) for i, chunk, row in places if 0 <= chunk - first < sum(active)]
        if here:
            index += [i for i, _, _ in here]
            inside.append(_states_behind([(chunk, row) for _, chunk, row in here], terms, before, u))
        first += sum(active)
    out = layout.unpack(torch.cat(outs)).to(v.dtype)
    if states_at is None:
        return out, torch.cat([state, *reversed(finished)])[layout.inverse_order]
    states = repeated_for(positions, starting)
    if inside:
        states = states.index_copy(0, torch.tensor(index, device=q.device), torch.cat(inside))
    return out, states


def _walk(
    terms: ChunkTerms, state: Tensor, active: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """From place to place of the sequences. state: [sequences, Hv, d_v, d_k]; active[i] of the chunks stand
    at place i of their sequences; a sequence without a chunk at some place has ended.

    Returns the states before the chunks [B, d_v, d_k], U [B, C, d_v], the states of the sequences that are
    active at the last place, and those of the sequences that ended before it, the shorter first.
    """
    heads = state.shape[1]
    state = state.flatten(0, 1)
    before, written, finished = [], [], []
    blocks = [count * heads for count in active]
    ws = [None] * len(active) if terms.w is None else terms.w.split(blocks)
    xs, ks, lefts = (t.split(blocks) for t in (terms.x, terms.k, terms.left))
    for x, w, k, left in zip(xs, ws, ks, lefts, strict=True):
        if len(x) < len(state):
            finished.append(state[len(x) :])
            state = state[: len(x)]
        u = x if w is None else torch.baddbmm(x, w, state.mT, alpha=-1)
        before.append(state)
        written.append(u)
        state = torch.addcmul(torch.bmm(u.mT, k), state, left)
    state, *finished = (t.unflatten(0, (-1, heads)) for t in (state, *finished))
    if len(before) == 1:  # as usual where a chunk of all heads fills the caches; `cat` would copy
        return before[0], written[0], state, finished
    return torch.cat(before), torch.cat(written), state, finished


def _states_behind(tokens: Sequence[tuple[int, int]], terms: ChunkTerms, before: Tensor, u: Tensor) -> Tensor:
    """The states behind tokens (chunk, row), [P, Hv, d_v, d_k]. before, u: as `_walk` returns them.

    With keys and log-decays behind the row at zero, the chunk ends there (padding does the same).
    """
    chunk, row = torch.tensor(tokens, device=u.device).unbind(1)
    keys, log_decay = terms.keys[chunk], terms.log_decay[chunk]
    later = torch.arange(keys.shape[-2], device=u.device) > row.unsqueeze(1)
    later = later.view(len(tokens), 1, 1, -1, 1)
    keys, log_decay = keys.masked_fill(later, 0), log_decay.masked_fill(later, 0)
    until = F.pad(log_decay[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2).exp()
    left = log_decay.sum(-2, keepdim=True).exp()
    before, u = (x.unflatten(0, (len(terms.keys), -1))[chunk].flatten(0, 1) for x in (before, u))
    states = torch.baddbmm(before * left.flatten(0, 2), u.mT, (keys * until).flatten(0, 2))
    return states.unflatten(0, (len(tokens), -1))
