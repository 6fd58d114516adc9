"""The explorer's two curves: memory against context, and what checkpoints cost by their interval.

Owns which points are drawn and how ticks read. Every value is the ledger's or a peer's rule's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from denim.ledger.cost import Ledger
from denim.ledger.intervals import INTERVALS, interval_cost
from denim.ledger.peers import SGLANG, SGLANG_RESERVED, VLLM, SglangLayout, VllmLayout
from denim.ledger.units import size_text
from denim.spec.model import ModelSpec

FIRST, LAST = 16, 1 << 20  # tokens; from 1 on where something happens before
PER_OCTAVE = 8
MOST_TICKS = 7


def lengths_between(first: int, last: int, also: Sequence[int] = ()) -> list[int]:
    """`PER_OCTAVE` whole lengths for every doubling, both ends included, and those of `also` between them."""
    octaves = (last // first).bit_length() - 1
    steps = [round(first * 2 ** (i / PER_OCTAVE)) for i in range(octaves * PER_OCTAVE + 1)]
    return sorted({*steps, *(n for n in also if first <= n <= last)})


def memory_curve(spec: ModelSpec, ledger: Ledger, kv_dtype: str, at: int) -> dict[str, Any]:
    """Bytes of one request against its tokens: the hybrid, all layers full, and the peers' rules. `at`: a
    length that must be among the points."""
    crossover = ledger.crossover_tokens
    named = {at} if crossover is None else {at, crossover}
    first = 1 if min(named) < FIRST else FIRST
    ticks = powers(first, LAST, 4)
    tokens = lengths_between(first, LAST, sorted(named))
    vllm = VllmLayout.of(spec, kv_dtype)
    sglang = SglangLayout.of(spec, kv_dtype, 0, SGLANG_RESERVED[0])
    slots = f", {SGLANG_RESERVED[0]} slots" if ledger.bytes_per_request else ""
    series = [
        _series("hybrid", "hybrid", [ledger.hybrid_bytes(n) for n in tokens]),
        _series("full", "every layer full", [ledger.all_full_bytes(n) for n in tokens]),
        _series("vllm", VLLM, [vllm.request_bytes(n) for n in tokens]),
        _series("sglang", SGLANG + slots, [sglang.request_bytes(n) for n in tokens]),
    ]
    values = [y for one in series for y in one["y"] if y]
    return {
        "x": tokens,
        "x_texts": [f"{n:,} tokens" for n in tokens],
        "x_ticks": [[n, count_tick(n)] for n in ticks],
        "y_ticks": [[n, size_text(n)] for n in size_ticks(min(values), max(values))],
        "series": [one for one in series if any(y is not None for y in one["y"])],
        "at": at,
        "rows": [i for i, n in enumerate(tokens) if n in named or n in ticks],
        "crossover": crossover,
        "crossover_text": None if crossover is None else f"crossover: {crossover:,} tokens",
        "crossover_bytes": None if crossover is None else ledger.hybrid_bytes(crossover),
    }


def interval_curve(ledger: Ledger, tokens: int) -> dict[str, Any] | None:
    """Checkpoints at every interval against the KV between them, and in a sequence of `tokens` tokens. None
    for a model without states or without KV: it has nothing to weigh."""
    equal = ledger.checkpoint_equals_kv_of_tokens
    if not equal:
        return None
    points = [
        interval_cost(ledger, n, tokens) for n in lengths_between(INTERVALS[0], INTERVALS[-1], INTERVALS)
    ]
    ratios = [point.times_kv or 0.0 for point in points]
    rows = [interval_cost(ledger, n, tokens) for n in INTERVALS]
    low, high = min(ratios), max(ratios)
    return {
        "tokens_text": f"{tokens:,} tokens",
        "equal": equal,
        "equal_text": f"{equal:,} tokens",
        "at": INTERVALS[len(INTERVALS) // 2],
        "x": [point.interval for point in points],
        "x_texts": [f"every {point.interval:,} tokens" for point in points],
        "x_ticks": [[n, count_tick(n)] for n in powers(INTERVALS[0], INTERVALS[-1], 4)],
        "y_ticks": [[10.0**k, times_text(10.0**k)] for k in range(-4, 6) if low / 10 < 10.0**k < high * 10],
        "series": [
            {
                "key": "checkpoint",
                "label": "checkpoint ÷ KV between two",
                "y": ratios,
                "texts": [times_text(ratio) for ratio in ratios],
            }
        ],
        "rows": [
            {
                **row._asdict(),
                "interval_text": f"{row.interval:,}",
                "checkpoints_text": f"{row.checkpoints:,}",
                "bytes_text": size_text(row.checkpoint_bytes),
                "times_text": times_text(row.times_kv or 0.0),
                "lost_text": f"{row.lost_tokens:,.0f}",
            }
            for row in rows
        ],
    }


def powers(first: int, last: int, base: int) -> list[int]:
    """first · base^k up to `last`."""
    found = [first]
    while found[-1] * base <= last:
        found.append(found[-1] * base)
    return found


def size_ticks(low: float, high: float) -> list[int]:
    """Powers of two from below `low` to `high`, as many as can be read."""
    start = 1 << (max(1, int(low)).bit_length() - 1)
    for base in (4, 16, 64, 256):
        ticks = powers(start, int(high), base)
        if len(ticks) <= MOST_TICKS:
            break
    return ticks


def count_tick(n: int) -> str:
    """A power of two as it is called: 256, 4k, 1M."""
    if n >= 1 << 20:
        return f"{n >> 20}M"
    return f"{n >> 10}k" if n >= 1024 else str(n)


def times_text(ratio: float) -> str:
    """ "1.6 ×": three significant digits, whole numbers from 100 on."""
    return f"{ratio:,.0f} ×" if ratio >= 100 else f"{ratio:.3g} ×"


def _series(key: str, label: str, values: Sequence[int | None]) -> dict[str, Any]:
    texts = ["" if y is None else size_text(y) for y in values]
    return {"key": key, "label": label, "y": list(values), "texts": texts}
