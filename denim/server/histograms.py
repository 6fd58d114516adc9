"""Histograms as the dashboard draws them.

Owns how a Prometheus histogram becomes bars with heights and texts. A percentile is known up to its bucket:
the bucket's upper bound is shown.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import Histogram

from denim.ledger.units import seconds_text

SHARES = (0.5, 0.9, 0.99)


def bars_of(histogram: Histogram) -> dict[str, Any]:
    """{count, bars: [{label, count, height}], percentiles: [{share, text}]}: a bar for each bucket from the
    first to the last that is not empty, `height` in percent of the highest."""
    bounds, counts = buckets(histogram)
    total = sum(counts)
    full = [i for i, n in enumerate(counts) if n]
    shown = range(full[0], full[-1] + 1) if full else range(0)
    highest = max(counts, default=0)
    return {
        "count": f"{total:,}",
        "bars": [
            {
                "label": _bound_text(bounds, i),
                "count": counts[i],
                "height": f"{100 * counts[i] / highest:.2f}%",
            }
            for i in shown
        ],
        "percentiles": [
            {"share": f"{share:.0%}", "text": percentile_text(bounds, counts, share)}
            for share in SHARES
            if total
        ],
    }


def buckets(histogram: Histogram) -> tuple[list[float | None], list[int]]:
    """(upper bounds in seconds, None for the last; how many are in each)."""
    bounds: list[float | None] = []
    counts: list[int] = []
    below = 0
    for sample in next(iter(histogram.collect())).samples:
        if sample.name.endswith("_bucket"):
            bound = sample.labels["le"]
            bounds.append(None if bound == "+Inf" else float(bound))
            counts.append(int(sample.value) - below)
            below = int(sample.value)
    return bounds, counts


def percentile_text(bounds: list[float | None], counts: list[int], share: float) -> str:
    """ "≤ 25 ms": the bound of the bucket that the share's value is in."""
    wanted, below = share * sum(counts), 0
    for i, count in enumerate(counts):
        below += count
        if below >= wanted and count:
            text = _bound_text(bounds, i)
            return text if bounds[i] is None else f"≤ {text}"
    return "none"


def _bound_text(bounds: list[float | None], bucket: int) -> str:
    """ "25 ms": its upper bound; "> 5 s" for the last, which has none."""
    bound = bounds[bucket]
    if bound is not None:
        return seconds_text(bound)
    below = bounds[bucket - 1]
    assert below is not None
    return f"> {seconds_text(below)}"
