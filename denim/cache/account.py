"""What the prefix cache did for requests, and why it did no more.

Owns the counters and the reasons. A token of a request is either unknown (nothing to reuse), reused, or known
and lost; every lost one has exactly one reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from denim.cache.node import Node

# Why tokens that were known had to be computed again.
NO_CHECKPOINT = "no_checkpoint"  # nothing was ever saved between the hit and where the request left the path
EVICTED = "evicted"  # a checkpoint stood deeper, and gave way to others
NO_MEMORY = "no_memory"  # a checkpoint was wanted deeper, but had no room or would not have paid
NOT_LOADED = "not_loaded"  # a lower tier has it, but computing it was quicker, or there was no room for it
ONE_TOKEN = "one_token"  # the prompt's last token, which is always computed

REASONS = (NO_CHECKPOINT, EVICTED, NO_MEMORY, NOT_LOADED, ONE_TOKEN)


def lost_tokens(nodes: Sequence[Node], seen: int, position: int, length: int, stored: int) -> Counter[str]:
    """Reason -> tokens, for a request of `length` tokens of which `seen` were known and `position` reused.

    `nodes` are those that it passed to their end. `stored`: the position that a lower tier has.
    """
    lost: Counter[str] = Counter()
    if seen == length:
        lost[ONE_TOKEN] = 1
    limit = max(min(seen, length - 1), stored)
    at = max(position, stored)
    lost[NOT_LOADED] = at - position
    for node in nodes:
        if node.lost is not None and at < node.end <= limit:
            lost[node.lost] += node.end - at
            at = node.end
    lost[NO_CHECKPOINT] += limit - at
    return +lost


class Account:
    """Counts over all requests. `flops(tokens)`: of a prefill from nothing."""

    def __init__(self, flops: Callable[[int], float]) -> None:
        self._flops = flops
        self.queries = self.query_tokens = self.hit_tokens = 0
        self.query_flops = self.hit_flops = 0.0
        self.saved = self.evicted = self.refused = 0
        self.lost: Counter[str] = Counter()

    def note_request(self, nodes: Sequence[Node], seen: int, position: int, length: int, stored: int) -> None:
        self.queries += 1
        self.query_tokens += length
        self.hit_tokens += position
        self.query_flops += self._flops(length)
        self.hit_flops += self._flops(position) if position else 0.0
        self.lost.update(lost_tokens(nodes, seen, position, length, stored))

    def stats(self) -> dict[str, Any]:
        """Tokens, FLOPs and checkpoints so far; `lost` has every reason, in tokens."""
        return {
            "queries": self.queries,
            "hit_tokens": self.hit_tokens,
            "query_tokens": self.query_tokens,
            "hit_flops": self.hit_flops,
            "query_flops": self.query_flops,
            "saved": self.saved,
            "evicted": self.evicted,
            "refused": self.refused,
            "lost": {reason: self.lost[reason] for reason in REASONS},
        }
