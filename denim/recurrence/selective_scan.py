"""The selective scan of Mamba1: token by token, by one step of a batch, and by chunks.

Owns the arithmetic of one rule, and nothing else. Knows tensors of packed sequences and their states.
Must not know of models, projections or slots; callers make delta, B and C and apply the output gate.

The rule
========
Each channel keeps a vector h of N numbers, and each of them fades at its own speed: channel c and state n by
exp(delta_t[c] A[c, n]) at token t, where delta_t[c] > 0 is the token's time step and A < 0 (arXiv 2312.00752,
with the input discretised as delta B). With h as rows of one matrix [channels, N], a token does

    h  = exp(delta_t A) h + (delta_t x_t) B_t^T        exp and the product with h element by element
    y  = h C_t + D x_t

B_t and C_t [N] are shared by all channels, as key and query are in the other rules, and delta_t x_t is the
value. What is new is the decay, one for each element of the state. It is no product of a factor of the
channel and one of n, so that no matrix product over tokens gives y: the weight of token s in y_t[c] is the
sum over n of C_t[n] B_s[n] exp(A[c, n] (delta_{s+1}[c] + .. + delta_t[c])), a new matrix for each channel.
(Mamba2 has one delta A for all the channels and n of a head, and so gets one matrix: `gated_accumulation`.)

By chunks
=========
But the rule stays linear in h. Let h_0 be the state before a chunk of tokens 1..K, and unroll:

    h_K = exp(A (delta_1 + .. + delta_K)) h_0 + r,        r = h_K of the same chunk begun at h_0 = 0

so chunks can be run at the same time, although the tokens in each go one by one:

1.  Run every chunk from zero, all in lockstep: K steps give every r.
2.  Go from chunk to chunk with the line above: now every chunk's h_0 is known.
3.  Run every chunk again from its h_0, all in lockstep, and read y and the states that are wanted.

That is 2 K + T / K steps one after the other instead of T, for twice the arithmetic; with chunks as long as
the sequences, step 1 falls away and the arithmetic is that of the rule. Only the current state of each chunk
is kept, so that memory is linear in T and small. Exponents are products of A <= 0 and sums of delta >= 0:
none is positive, none is a difference. A padded token has delta = 0 and leaves h as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from denim.recurrence.chunks import ChunkLayout
from denim.recurrence.operands import check_operands
from denim.recurrence.sequences import (
    offsets_of,
    positions_of,
    repeated_for,
    starting_states,
    token_by_token,
    work_dtype,
)
from denim.recurrence.state_rows import blocks_of, widened, write_back

_CPU_BLOCK_BYTES = (
    1 << 19
)  # of the states in lockstep; they and one tensor of decays should stay in the caches


def selective_scan_recurrent(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    cu_seqlens: Sequence[int] | Tensor,
    initial_state: Tensor | None = None,
    states_at: Sequence[Sequence[int]] | None = None,
) -> tuple[Tensor, Tensor]:
    """The rule token by token, as the module docstring states it. The reference for the other forms.

    x, delta (>= 0): [T, channels]; A (<= 0): [channels, N]; B, C: [T, N]; D: [channels] or None for no skip.
    T counts the tokens of sequences that lie one behind the other. cu_seqlens, initial_state [sequences,
    channels, N] and states_at: see `denim.recurrence.sequences`.

    Returns y [T, channels] in x's dtype, and the states behind the sequences [sequences, channels, N], or
    those at states_at [P, channels, N]. The arithmetic and the states are fp32, or float64 if x is.
    ValueError for operands that do not fit each other.
    """
    _check(x, delta, A, B, C, D)
    offsets = offsets_of(cu_seqlens, len(x))
    positions = positions_of(states_at, offsets)
    starting = starting_states(initial_state, len(positions), A.shape, x)
    wide_x, delta, A, B, C = (t.to(work_dtype(x)) for t in (x, delta, A, B, C))
    value = delta * wide_x

    def advance(state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        state = (delta[t].unsqueeze(1) * A).exp() * state + torch.outer(value[t], B[t])
        return state, state @ C[t]

    outs, states = token_by_token(advance, starting, offsets, positions)
    y = torch.stack(outs) if outs else torch.zeros_like(wide_x)
    return _with_skip(y, wide_x, D).to(x.dtype), states


def selective_scan_step(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor | Sequence[Tensor],
) -> Tensor:
    """One token for each of b sequences; `state` is updated in place. For inference: no gradients.

    x, delta: [b, channels]; A: [channels, N]; B, C: [b, N]; D: [channels] or None. state: [b, channels, N] or
    b tensors [channels, N] (slots of an arena, say); each row is dense, rows may lie anywhere and are not
    copied. Returns y [b, channels] in x's dtype; the arithmetic is in the state's dtype, or fp32 if that is
    narrower. ValueError for operands that do not fit each other.
    """
    _check(x, delta, A, B, C, D)
    blocks = blocks_of(state, (len(x), *A.shape), x)
    if not blocks:
        return torch.empty_like(x)
    if (wide := widened(blocks)) is not None:
        y = selective_scan_step(x, delta, A, B, C, D, wide)
        write_back(wide, blocks)
        return y
    wide_x, delta, A, B, C = (t.to(blocks[0].dtype) for t in (x, delta, A, B, C))
    tokens = (t.split(len(blocks[0])) for t in (delta, delta * wide_x, B, C))
    ys = []
    for h, delta_i, value_i, B_i, C_i in zip(blocks, *tokens, strict=True):
        _write(delta_i, value_i, A, B_i, h)
        ys.append(_read(C_i, h))
    return _with_skip(torch.cat(ys), wide_x, D).to(x.dtype)


def selective_scan_chunked(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    cu_seqlens: Sequence[int] | Tensor,
    initial_state: Tensor | None = None,
    states_at: Sequence[Sequence[int]] | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """The rule by chunks of `chunk_size` tokens, any number from 1: arguments, results and errors of
    `selective_scan_recurrent`.

    For inference: no gradients. Channels do not touch each other, so a CPU takes as many at a time as its
    caches hold. A cu_seqlens on a GPU costs a synchronisation: pass a list.
    """
    _check(x, delta, A, B, C, D)
    offsets = offsets_of(cu_seqlens, len(x))
    positions = positions_of(states_at, offsets)
    starting = starting_states(initial_state, len(positions), A.shape, x)
    layout = ChunkLayout.of(offsets, chunk_size, x.device)
    states = repeated_for(positions, starting)
    if not layout.active:  # no tokens at all
        return torch.zeros_like(x), states
    wanted: dict[int, list[tuple[int, int]]] = {}  # by row of the chunks: (index in `states`, chunk)
    for index, chunk, row in layout.places_of(positions):
        wanted.setdefault(row, []).append((index, chunk))

    wide_x, delta, A, B, C = (t.to(work_dtype(x)) for t in (x, delta, A, B, C))
    packed = (layout.pack(t.unsqueeze(1), t.dtype).squeeze(1) for t in (delta, delta * wide_x, B, C))
    delta, value, B, C = packed  # [chunks, K, channels or N]
    y = torch.empty_like(value)
    starting = starting[layout.order]
    channels = len(A)
    at_once = max(1, _CPU_BLOCK_BYTES // (len(B) * A[:1].nbytes)) if x.is_cpu else channels
    for first in range(0, channels, at_once):
        some = slice(first, first + at_once)
        h = _states_before(delta[..., some], value[..., some], A[some], B, starting[:, some], layout.active)
        for row in range(layout.chunk_size):
            _write(delta[:, row, some], value[:, row, some], A[some], B[:, row], h)
            y[:, row, some] = _read(C[:, row], h)
            for index, chunk in wanted.get(row, ()):
                states[index, some] = h[chunk]
    y = layout.unpack(y.unsqueeze(1)).squeeze(1)
    return _with_skip(y, wide_x, D).to(x.dtype), states


def _check(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> None:
    skip = {} if D is None else {"D": (D, "channels")}
    tokens = {"x": (x, "T channels"), "delta": (delta, "T channels")}
    check_operands(**tokens, A=(A, "channels N"), B=(B, "T N"), C=(C, "T N"), **skip)


def _states_before(
    delta: Tensor, value: Tensor, A: Tensor, B: Tensor, starting: Tensor, active: Sequence[int]
) -> Tensor:
    """Steps 1 and 2 of the module docstring: the states before all chunks, [chunks, channels, N].

    delta, value: [chunks, K, channels]; B: [chunks, K, N]; starting: [sequences, channels, N]. active[i] of
    the chunks stand at place i of their sequences, the same ones first; the others have ended.
    """
    followed = sum(active[:-1])  # chunks with a place behind theirs
    added = starting.new_zeros(followed, *A.shape)
    for row in range(delta.shape[1] if followed else 0):
        _write(delta[:followed, row], value[:followed, row], A, B[:followed, row], added)
    left = (delta[:followed].sum(1).unsqueeze(-1) * A).exp()
    before = [starting[: active[0]]]
    for count, added_i, left_i in zip(
        active[1:], added.split(active[:-1]), left.split(active[:-1]), strict=True
    ):
        before.append((left_i * before[-1] + added_i)[:count])
    return torch.cat(before)


def _write(delta: Tensor, value: Tensor, A: Tensor, B: Tensor, h: Tensor) -> None:
    """One token of each of b states h [b, channels, N], in place. delta, value: [b, channels]; B: [b, N]."""
    h.mul_((delta.unsqueeze(-1) * A).exp_()).addcmul_(value.unsqueeze(-1), B.unsqueeze(1))


def _read(C: Tensor, h: Tensor) -> Tensor:
    """[b, channels] of C [b, N] and h [b, channels, N]: y without the skip."""
    return torch.bmm(h, C.unsqueeze(-1)).squeeze(-1)


def _with_skip(y: Tensor, x: Tensor, D: Tensor | None) -> Tensor:
    return y if D is None else torch.addcmul(y, x, D)
