"""Numbers as people read them."""

from __future__ import annotations

import pytest

from denim.ledger.units import count_text, flops_text, pattern_text, size_text


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0 B"), (1023, "1023 B"), (12288, "12 KiB"), (19537920, "18.6 MiB"), (2**50 * 5000, "5000 PiB")],
)
def test_sizes(n: int, text: str) -> None:
    assert size_text(n) == text


def test_flops_and_counts() -> None:
    assert flops_text(1_512_345_678) == "1.51 GFLOP"
    assert flops_text(7) == "7 FLOP"
    assert (count_text(752_393_024), count_text(950), count_text(34_700_000_000)) == ("752M", "950", "34.7B")


def test_patterns() -> None:
    assert pattern_text("LLLF" * 6) == "LLLF × 6"
    assert pattern_text("LLLF") == "LLLF"
    assert pattern_text("LLFL") == "LLFL"
    assert pattern_text("FF") == "F × 2"
    assert pattern_text("") == ""
