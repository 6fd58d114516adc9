"""Bars of a histogram: one a bucket, and percentiles by their bucket's bound."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram

from denim.server.histograms import bars_of


def histogram(*values: float) -> Histogram:
    made = Histogram("seconds", "Of a test.", buckets=(0.1, 0.25, 0.5, 1.0), registry=CollectorRegistry())
    for value in values:
        made.observe(value)
    return made


def test_bars_from_the_first_to_the_last_that_is_not_empty() -> None:
    shown = bars_of(histogram(0.2, 0.2, 0.2, 0.2, 0.7, 3.0))
    assert [(bar["label"], bar["count"], bar["height"]) for bar in shown["bars"]] == [
        ("250 ms", 4, "100.00%"),
        ("500 ms", 0, "0.00%"),
        ("1 s", 1, "25.00%"),
        ("> 1 s", 1, "25.00%"),
    ]
    assert shown["count"] == "6"


def test_percentiles() -> None:
    shown = bars_of(histogram(*[0.05] * 50, *[0.3] * 40, *[0.9] * 9, 7.0))
    texts = {one["share"]: one["text"] for one in shown["percentiles"]}
    assert texts == {"50%": "≤ 100 ms", "90%": "≤ 500 ms", "99%": "≤ 1 s"}
    assert bars_of(histogram(7.0))["percentiles"][0]["text"] == "> 1 s"


def test_nothing_yet() -> None:
    assert bars_of(histogram()) == {"count": "0", "bars": [], "percentiles": []}
