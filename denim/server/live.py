"""What the dashboard shows, second by second, as plain JSON values with their texts.

Owns one viewer's history, the rates between two looks, and the sentences. Where the numbers come from, engine
and metrics know.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from denim.ledger.units import size_text
from denim.server.histograms import bars_of
from denim.server.serving import Serving
from denim.server.tree_rows import rows_of

PERIOD = 1.0  # seconds between two looks
HISTORY = 120  # looks that a viewer sees
TREE_EVERY = 3  # looks; walking a large prefix tree takes the engine some milliseconds
MOST_CELLS = 640  # of the arena; more slabs share a cell

REASONS = {
    "no_checkpoint": "never saved",
    "evicted": "saved, then evicted",
    "no_memory": "wanted, but no memory",
    "not_loaded": "in a lower tier, quicker to compute",
    "one_token": "the last token, always computed",
}
"""Reasons of `denim.cache.account` in words."""

SIDES = {".": "empty", "p": "pages", "s": "slots"}


class Viewer:
    """One open dashboard."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._before: tuple[float, float, float] | None = None  # when, generated, applied
        self._rates: deque[tuple[float, float]] = deque(maxlen=HISTORY)
        self._looks = 0
        self._tree: dict[str, Any] | None = None

    async def look(self) -> dict[str, Any]:
        """All that is shown now. Raises EngineUnavailableError where there is no engine to ask."""
        serving = self._serving
        view = await serving.engine.live_view()
        if self._looks % TREE_EVERY == 0:
            self._tree = rows_of(await serving.engine.cache_snapshot())
        self._looks += 1
        return {
            "facts": self._facts(view),
            "arena": arena_shown(view),
            "requests": requests_shown(view["requests"]),
            "throughput": self._throughput(view["stats"]["tokens"]),
            "first_token": bars_of(serving.metrics.first_token),
            "inter_token": bars_of(serving.metrics.inter_token),
            "lost": lost_shown(view["stats"]["prefix"]),
            "tree": self._tree,
        }

    def _throughput(self, applied: float) -> dict[str, Any]:
        """A chart of tokens per second: generated, and applied by the engine, prompts and all."""
        now, generated = time.monotonic(), self._serving.metrics.generated_tokens
        if self._before is not None:
            then, generated_before, applied_before = self._before
            # An engine that was started anew counts from nothing.
            fresh = applied < applied_before
            seconds = max(now - then, 1e-9)
            applied_since = applied if fresh else applied - applied_before
            self._rates.append(((generated - generated_before) / seconds, applied_since / seconds))
        self._before = (now, generated, applied)
        rates = list(self._rates) or [(0.0, 0.0)]
        first = 1 - len(rates)
        top = nice_top(max(value for pair in rates for value in pair))
        return {
            "x": list(range(first, 1)),
            "x_texts": ["now" if i == 0 else f"{-i} s ago" for i in range(first, 1)],
            "x_ticks": [[i, "now" if i == 0 else f"{-i} s"] for i in range(-HISTORY, 1, 30)],
            "y_ticks": [[top * i / 4, f"{top * i / 4:,.0f}"] for i in range(5)],
            "series": [
                _series("first", "generated", [pair[0] for pair in rates]),
                _series("second", "applied, prompts and all", [pair[1] for pair in rates]),
            ],
        }

    def _facts(self, view: dict[str, Any]) -> list[dict[str, Any]]:
        stats, prefix, facts = view["stats"], view["stats"]["prefix"], self._serving.engine.facts
        queried, hit = prefix["query_tokens"], prefix["hit_tokens"]
        waiting, swapped = stats["waiting"], stats["swapped"]
        arena = view["slabs"]["slab_bytes"] * stats["slabs"]["total"]
        return [
            _fact("running", "running", stats["running"], f"{waiting:,} waiting, {swapped:,} swapped out"),
            _fact("steps", "steps", stats["steps"], f"{stats['captured_steps']:,} of them captured graphs"),
            _fact(
                "hits",
                "prompt tokens reused",
                hit,
                f"{hit / queried:.0%} of {queried:,}" if queried else "no prompt yet",
            ),
            {
                "key": "arena",
                "label": "arena",
                "value": arena,
                "text": size_text(arena),
                "note": f"{stats['slabs']['total']:,} slabs of {size_text(view['slabs']['slab_bytes'])}",
            },
            _fact(
                "preempted",
                "preempted",
                stats["preempted_swap"] + stats["preempted_recompute"],
                f"{stats['preempted_swap']:,} moved to the host, {stats['preempted_recompute']:,} recomputed",
            ),
            {
                "key": "model",
                "label": "model",
                "value": facts.model,
                "text": facts.model,
                "note": f"{facts.dtype} on {facts.device}; up to {facts.max_model_len:,} tokens",
            },
        ]


def arena_shown(view: dict[str, Any]) -> dict[str, Any]:
    """{cells: [[side, level]], each, kinds: [{key, slabs, text}]}: the slabs in their order, `each` of them a
    cell. A cell's side is that of most of its slabs; its level, 0 to 3, how full they are."""
    slabs, stats = view["slabs"], view["stats"]
    sides, held = slabs["sides"], slabs["held"]
    each = -(-len(sides) // MOST_CELLS) if sides else 1
    cells = []
    for at in range(0, len(sides), each):
        group = sides[at : at + each]
        side = max(SIDES, key=lambda letter: (group.count(letter), letter != "."))
        fill = sum(map(int, held[at : at + each])) / (9 * len(group))
        cells.append([SIDES[side], -(-round(300 * fill) // 100)])
    kinds = []
    for key in ("slots", "pages"):
        part = stats[key]
        if part["total"]:
            text = f"{part['used']:,} used, {part['cached']:,} cached, {part['free']:,} could be had"
            kinds.append({"key": key, "slabs": sides.count(key[0]), "text": f"{key}: {text}"})
    empty = sides.count(".")
    kinds.append({"key": "empty", "slabs": empty, "text": f"{empty:,} slabs empty, for either side"})
    return {
        "cells": cells,
        "each": "one slab" if each == 1 else f"{each:,} slabs",
        "kinds": kinds,
    }


def requests_shown(requests: dict[str, Any]) -> dict[str, Any]:
    """Rows of the table, and bars of what of a request is cached, computed and generated."""
    rows = []
    for one in requests["shown"]:
        whole = max(1, one["prompt"] + one["most_tokens"])
        cached = min(one["cached"], one["computed"])
        computed = max(0, min(one["computed"], one["prompt"]) - cached)
        rows.append(
            {
                "id": f"{one['id'][:8]}" + (f" · {one['index']}" if one["index"] else ""),
                "status": one["status"],
                "prompt": f"{one['prompt']:,}",
                "cached": f"{one['cached']:,}",
                "generated": f"{one['generated']:,}",
                "age": f"{one['seconds']:.1f} s",
                "first": "" if one["first"] is None else f"{1000 * one['first']:.0f} ms",
                "bars": [
                    ["cached", f"{100 * cached / whole:.2f}%"],
                    ["computed", f"{100 * computed / whole:.2f}%"],
                    ["generated", f"{100 * one['generated'] / whole:.2f}%"],
                ],
            }
        )
    more = requests["total"] - len(rows)
    return {"rows": rows, "more": f"and {more:,} more" if more else "", "total": requests["total"]}


def lost_shown(prefix: dict[str, Any]) -> list[dict[str, Any]]:
    """Tokens reused, and tokens that were known and computed again, by reason; widths of the largest."""
    found = [("reused", "reused", prefix["hit_tokens"])]
    found += [(key, REASONS[key], tokens) for key, tokens in prefix["lost"].items()]
    most = max(tokens for _, _, tokens in found)
    return [
        {
            "key": key,
            "label": label,
            "tokens": tokens,
            "text": f"{tokens:,}",
            "width": f"{100 * tokens / most:.2f}%" if most else "0%",
        }
        for key, label, tokens in found
    ]


def nice_top(highest: float) -> float:
    """The smallest of 4, 8, 20, 40, 80, 200, … that is at least `highest`."""
    top = 4.0
    while top < highest:
        top *= 2.5 if str(int(top))[0] == "8" else 2
    return top


def _series(key: str, label: str, values: list[float]) -> dict[str, Any]:
    return {"key": key, "label": label, "y": values, "texts": [f"{value:,.0f} tokens/s" for value in values]}


def _fact(key: str, label: str, value: int, note: str) -> dict[str, Any]:
    return {"key": key, "label": label, "value": value, "text": f"{value:,}", "note": note}
