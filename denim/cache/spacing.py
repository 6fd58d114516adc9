"""Positions in very long prompts, from how deep requests have agreed with earlier ones.

Owns the measured depths and the dynamic programme over them. With nothing measured all depths count alike,
which gives even spacing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BINS = 48
"""Depths are counted in so many bins of equal width over the new part of a prompt."""

MEASURED = 512
"""Depths that are remembered; older ones give way, so that the placing follows the workload."""

PRIOR = 1 / 8
"""Weight, in measured depths, of every bin before anything was measured there."""

EPSILON = 1e-9
"""A further checkpoint must save more than rounding does."""


class OverlapDepths:
    """`tokens_each`: one checkpoint for every so many tokens of a prompt's new part; 0: none at all.

    The ledger gives it: the tokens whose KV weighs a few times as much as a checkpoint, so that the
    checkpoints of a long prompt stay a small part of what it takes anyway.
    """

    def __init__(self, tokens_each: int) -> None:
        self._tokens_each = tokens_each
        self._depths: list[int] = []
        self._next = 0

    def note(self, depth: int) -> None:
        """A request agreed with an earlier one in its first `depth` tokens, and then left it."""
        if len(self._depths) < MEASURED:
            self._depths.append(depth)
        else:
            self._depths[self._next] = depth
            self._next = (self._next + 1) % MEASURED

    def spaced(self, start: int, end: int) -> list[int]:
        """Positions between `start` and `end`, in order; few, or none in a short part."""
        if not self._tokens_each or (count := (end - start) // self._tokens_each) < 1:
            return []
        width = (end - start) / BINS
        weights = [0] * BINS
        for depth in self._depths:
            if start < depth <= end:
                weights[min(BINS - 1, int((depth - start) / width))] += 1
        chosen = place(weights, min(count, BINS - 1))
        return [start + int(at * width) for at in chosen]


def place(weights: Sequence[int], count: int) -> tuple[int, ...]:
    """Which of the bins 1 .. n-1 begin with a checkpoint, so that the least is computed again.

    `weights[b]` requests agree up to the middle of bin b; each begins from the nearest checkpoint before it,
    the first bin's begin being always one. Minimises the sum of distances over at most `count` checkpoints.
    O(bins² · count).
    """
    bins = len(weights)
    weight = np.asarray(weights) + PRIOR
    total = np.concatenate([[0.0], np.cumsum(weight)])
    moment = np.concatenate([[0.0], np.cumsum(weight * (np.arange(bins) + 0.5))])
    begin = np.arange(bins + 1)[:, None]
    # Of the depths in bins begin .. end-1, with the one checkpoint at `begin`.
    cost = (moment[None, :] - moment[:, None]) - begin * (total[None, :] - total[:, None])
    cost[begin >= np.arange(bins + 1)] = np.inf
    best, choices = cost[0], []
    best[0] = 0.0
    for _ in range(count):
        through = best[:, None] + cost  # [last checkpoint, end]
        choices.append(np.where(through.min(axis=0) < best - EPSILON, through.argmin(axis=0), 0))
        best = np.minimum(best, through.min(axis=0))
    chosen: list[int] = []
    end = bins
    for choice in reversed(choices):
        if choice[end]:
            end = int(choice[end])
            chosen.append(end)
    return tuple(sorted(chosen))
