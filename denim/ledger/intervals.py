"""What it costs to keep a checkpoint every so many tokens, and what a miss between two of them costs.

Owns those sums. What Denim really keeps is chosen by its policy, not by an interval.
"""

from __future__ import annotations

from typing import NamedTuple

from denim.ledger.cost import Ledger

INTERVALS = (16, 64, 256, 576, 1024, 2048, 4096, 8192, 16384, 32768)
"""Tokens; 16 is a page, 576 a block of vLLM's on Qwen3.5-0.8B."""


class IntervalCost(NamedTuple):
    """A sequence of some length with a checkpoint every `interval` tokens.

    `times_kv`: their bytes over those of the KV of the tokens between two of them; None without KV.
    `lost_tokens`: computed again on average when a prefix ends anywhere between two checkpoints.
    """

    interval: int
    checkpoints: int
    checkpoint_bytes: int
    times_kv: float | None
    lost_tokens: float


def interval_cost(ledger: Ledger, interval: int, tokens: int) -> IntervalCost:
    """The cost of a checkpoint every `interval` tokens in a sequence of `tokens` tokens."""
    count = tokens // interval
    return IntervalCost(
        interval,
        count,
        count * ledger.bytes_per_request,
        ledger.checkpoint_ratio(interval),
        (interval - 1) / 2,
    )
