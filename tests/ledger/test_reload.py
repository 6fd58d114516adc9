"""When bringing a checkpoint up beats computing it again."""

from __future__ import annotations

import pytest

from denim.cache.sizing import prefill_curve
from denim.ledger.preemption import RATES
from denim.ledger.reload import DISK, DISK_BYTES_PER_SECOND, HOST, reload_rule
from tests.memory.test_layout import QWEN_08B

SLOT, PAGE = 19_000_000, 196_608  # bytes, about


def pays(start: int, end: int, tier: str, device: str = "cuda") -> bool:
    rule = reload_rule(prefill_curve(QWEN_08B), device)
    return rule(start, end, SLOT + PAGE * (end - start) // 16, tier)


def test_long_prefixes_pay_and_short_ones_do_not() -> None:
    """On an H200 a few hundred tokens are computed before their state has crossed the link; and the longer a
    prefix is, the more it pays."""
    for tier in (HOST, DISK):
        outcomes = [pays(0, tokens, tier) for tokens in (16, 64, 4096, 16384, 65536, 262144)]
        assert outcomes == sorted(outcomes) and not outcomes[0]
        assert outcomes[-1]
    assert pays(0, 16384, HOST)


def test_what_is_there_already_counts_for_nothing() -> None:
    assert pays(0, 16384, HOST) and not pays(16300, 16384, HOST)


def test_a_file_costs_both_ways() -> None:
    """From a file to the host, and from there to the device: there is a length between the two."""
    only_host = [tokens for tokens in range(64, 20_000, 64) if pays(0, tokens, HOST) > pays(0, tokens, DISK)]
    assert only_host


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_seconds_are_bytes_over_rates(device: str) -> None:
    rates = RATES[device]
    rule = reload_rule(lambda tokens: tokens * rates.flops_per_second, device)  # a second a token
    whole = int(rates.link_bytes_per_second)
    assert rule(0, 1, whole - 1, HOST) and not rule(0, 1, whole + 1, HOST)
    both = 1 / (1 / rates.link_bytes_per_second + 1 / DISK_BYTES_PER_SECOND)
    assert rule(0, 1, int(both) - 1, DISK) and not rule(0, 1, int(both) + 2, DISK)
