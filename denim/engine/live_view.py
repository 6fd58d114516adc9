"""An engine at one moment, as plain JSON values for whoever shows it: slabs by side, requests in work.

Owns the form. Holds no text and no token ids, which are users'. Changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from denim.engine.in_flight import InFlight
from denim.memory.arena import Arena
from denim.scheduler.request import Request

MOST_REQUESTS = 100
"""Requests that are listed; the oldest ones first."""

EMPTY, FULL = ".", "9"
"""Of a slab: no class; all entries held. Digits between say how many ninths are, rounded up."""


def slab_view(arena: Arena) -> dict[str, Any]:
    """sides: a letter a slab, the first of its class's name, or `EMPTY`; held: a digit a slab; slab_bytes."""
    sides, held = [], []
    for name, entries, count in arena.slabs():
        sides.append(name[0] if name else EMPTY)
        held.append(str(-(-9 * entries // count)) if name else "0")
    return {"sides": "".join(sides), "held": "".join(held), "slab_bytes": arena.layout.slab_bytes}


def request_view(in_flight: Iterable[InFlight], requests: Mapping[int, Request]) -> dict[str, Any]:
    """total: completions in work; shown: at most `MOST_REQUESTS`, each {id, index, status, prompt, cached,
    computed, generated, most_tokens, pages, preemptions, seconds since it came, first: seconds to its first
    token or None}, counts in tokens."""
    now = time.monotonic()
    rows: list[dict[str, Any]] = []
    total = 0
    for one in in_flight:
        metrics = one.metrics
        first = metrics.first_token_time
        for id_ in one.unfinished():
            total += 1
            request = requests.get(id_)
            if request is None or len(rows) >= MOST_REQUESTS:
                continue
            rows.append(
                {
                    "id": one.output.request_id,
                    "index": one.completions[id_].output.index,
                    "status": request.status.value,
                    "prompt": request.num_prompt,
                    "cached": one.output.num_cached_tokens or 0,
                    "computed": request.computed,
                    "generated": request.num_output,
                    "most_tokens": request.max_tokens,
                    "pages": len(request.pages),
                    "preemptions": request.preemptions,
                    "seconds": now - metrics.arrival_time,
                    "first": None if first is None else first - metrics.arrival_time,
                }
            )
    return {"total": total, "shown": rows}
