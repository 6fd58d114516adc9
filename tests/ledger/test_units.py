"""Numbers as people read them."""

from __future__ import annotations

import pytest

from denim.errors import ConfigError
from denim.ledger.units import (
    count_text,
    flops_text,
    parse_bytes,
    pattern_text,
    plural,
    seconds_text,
    size_text,
)


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (12288, "12 KiB"),
        (19537920, "18.6 MiB"),
        (2**50 * 5000, "5000 PiB"),
    ],
)
def test_sizes(n: int, text: str) -> None:
    assert size_text(n) == text


def test_flops_and_counts() -> None:
    assert flops_text(1_512_345_678) == "1.51 GFLOP"
    assert flops_text(7) == "7 FLOP"
    assert (count_text(752_393_024), count_text(950), count_text(34_700_000_000)) == ("752M", "950", "34.7B")


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.5, "1.5 s"), (0.0123456, "12.3 ms"), (3.57e-6, "3.57 µs"), (2e-8, "0.02 µs")]
)
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_nouns() -> None:
    assert [plural("hit", n) for n in (0, 1, 2)] == ["hits", "hit", "hits"]


def test_patterns() -> None:
    assert pattern_text("LLLF" * 6) == "LLLF × 6"
    assert pattern_text("LLLF") == "LLLF"
    assert pattern_text("LLFL") == "LLFL"
    assert pattern_text("FF") == "F × 2"
    assert pattern_text("") == ""


@pytest.mark.parametrize(
    ("value", "n"),
    [
        (0, 0),
        (17, 17),
        ("0", 0),
        ("512 MiB", 512 * 2**20),
        ("8GiB", 8 * 2**30),
        ("1.5 kb", 1500),
        ("2e9", 2 * 10**9),
        (" 12 ", 12),
        ("1.5GB", 15 * 10**8),
    ],
)
def test_bytes(value: int | str, n: int) -> None:
    assert parse_bytes("memory", value) == n


@pytest.mark.parametrize(
    "value",
    ["1.5", "1.5B", -1, "-1", True, "8 gigabytes", "1.2.3", "1.2.3MiB", "GiB", "1 parsec", "", None, 1.5],
)
def test_what_is_no_number_of_bytes(value: object) -> None:
    with pytest.raises(ConfigError, match="memory=.*give bytes as a whole number, or with KiB"):
        parse_bytes("memory", value)
