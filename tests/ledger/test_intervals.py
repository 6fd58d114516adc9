"""Checkpoints every so many tokens."""

from __future__ import annotations

import pytest

from denim.ledger.cost import ledger_of
from denim.ledger.intervals import INTERVALS, interval_cost
from denim.spec.illustrative import illustrative


def test_the_illustrative_model() -> None:
    """A checkpoint is 72 MiB, as much as 3,072 tokens of 24 KiB."""
    ledger = ledger_of(illustrative())
    cost = interval_cost(ledger, 1024, 32768)
    assert (cost.checkpoints, cost.checkpoint_bytes, cost.times_kv) == (32, 32 * 72 << 20, 3.0)
    assert interval_cost(ledger, 3072, 32768).times_kv == 1


@pytest.mark.parametrize("interval", INTERVALS)
def test_a_miss_loses_the_mean_of_all_places(interval: int) -> None:
    cost = interval_cost(ledger_of(illustrative()), interval, 1 << 20)
    assert cost.lost_tokens == sum(range(interval)) / interval
