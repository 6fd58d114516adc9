"""Sequences that lie one behind the other in one tensor, and the states that a rule gives for them.

Owns the meaning of `cu_seqlens`, `initial_state` and `states_at`, and the loop token by token that every
rule's reference form is. Knows tensors of packed sequences; must not know any rule.

cu_seqlens: N + 1 offsets; sequence n is tokens cu_seqlens[n] .. cu_seqlens[n + 1] - 1.
initial_state: [N, *state], the states before the sequences; None for zeros.
states_at: for each sequence the token counts p at which its state is wanted, 0 <= p <= its length, in any
order; the result then is [P, *state], one sequence after the other, where the state at p stands for exactly
the first p tokens (0: the initial state). None wants each sequence's last state: [N, *state].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from denim.recurrence.operands import check_numbers, whole_numbers

WORK_DTYPES = (torch.float32, torch.float64)  # of all arithmetic; what is narrower is widened


def work_dtype(x: Tensor) -> torch.dtype:
    """Of the arithmetic and of the states that come out: float64 if x is, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def offsets_of(cu_seqlens: Sequence[int] | Tensor, tokens: int) -> list[int]:
    """cu_seqlens as a list on the host. ValueError if it does not rise from 0 to `tokens`."""
    offsets = whole_numbers(cu_seqlens)
    if not offsets or offsets[0] != 0 or offsets[-1] != tokens or offsets != sorted(offsets):
        raise ValueError(
            f"cu_seqlens must be whole numbers that rise from 0 to the number of tokens, {tokens}; "
            f"got {offsets or cu_seqlens!r}"
        )
    return offsets


def positions_of(states_at: Sequence[Sequence[int]] | None, offsets: Sequence[int]) -> list[list[int]]:
    """For each sequence the token counts at which its state is wanted.

    ValueError if there are more or fewer lists than sequences, or what is no count of its sequence's tokens.
    """
    lengths = [end - start for start, end in pairwise(offsets)]
    if states_at is None:
        return [[length] for length in lengths]
    if not hasattr(states_at, "__len__"):
        raise ValueError(f"states_at must be a list of lists of token counts; got {states_at!r}")
    if len(states_at) != len(lengths):
        raise ValueError(f"states_at has {len(states_at)} lists for {len(lengths)} sequences")
    wanted = []
    for n, (given, length) in enumerate(zip(states_at, lengths, strict=True)):
        positions = whole_numbers(given)
        if positions is None or any(not 0 <= position <= length for position in positions):
            raise ValueError(
                f"states_at[{n}] must be a list of token counts in 0 .. {length}; got {positions or given!r}"
            )
        wanted.append(positions)
    return wanted


def starting_states(initial: Tensor | None, sequences: int, shape: Sequence[int], like: Tensor) -> Tensor:
    """`initial` or zeros, [sequences, *shape], in the dtype of `like`'s arithmetic and on its device.

    ValueError if `initial` has another shape, or is not of floating-point numbers on `like`'s device.
    """
    if initial is None:
        return like.new_zeros(sequences, *shape, dtype=work_dtype(like))
    check_numbers("initial_state", initial, "the tokens", like)
    if initial.shape != (sequences, *shape):
        raise ValueError(f"initial_state must be {[sequences, *shape]}; got {list(initial.shape)}")
    return initial.to(work_dtype(like))


def repeated_for(positions: Sequence[Sequence[int]], starting: Tensor) -> Tensor:
    """The starting state of each position's sequence, [P, *state]: the state at position 0. A copy."""
    return starting[[n for n, at in enumerate(positions) for _ in at]]


def token_by_token(
    advance: Callable[[Tensor, int], tuple[Tensor, Tensor]],
    starting: Tensor,
    offsets: Sequence[int],
    positions: Sequence[Sequence[int]],
) -> tuple[list[Tensor], Tensor]:
    """The loop of the reference forms.

    advance(state, t) applies token t and returns the new state and the token's output; it must not write
    into the state that it was given. starting: [N, *state].
    Returns the T outputs and the states at `positions`, [P, *state].
    """
    outs, kept = [], []
    for state, start, end, wanted in zip(starting, offsets[:-1], offsets[1:], positions, strict=True):
        reached = {0: state}
        for t in range(start, end):
            state, out = advance(state, t)
            outs.append(out)
            if t + 1 - start in wanted:
                reached[t + 1 - start] = state
        kept += [reached[position] for position in wanted]
    return outs, torch.stack(kept) if kept else starting[:0]
