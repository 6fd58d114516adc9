"""The prefix tree as rows of bars, for the dashboard.

Owns the layout: a node is a bar from its first to its last token; its first child goes on in the same row,
the others begin rows below. Knows a snapshot of the tree (`denim.cache.snapshot`), not the tree.
"""

from __future__ import annotations

from typing import Any

from denim.cache.snapshot import children_by_node
from denim.ledger.units import plural, size_text

MOST_ROWS = 24
ROW_HEIGHT = 17  # pixels, as in the style sheet


def rows_of(snapshot: dict[str, Any] | None) -> dict[str, Any] | None:
    """{rows: [[{left, width, rise, checkpoint, hits, running, text}]], ticks: [{left, text}], left_out,
    text}, or None without a cache. Lefts and widths are percent of the longest path; `rise` is how far up the
    parent of a row's first bar lies, None for a child of the root."""
    if snapshot is None:
        return None
    nodes: list[dict[str, Any]] = snapshot["nodes"]
    children = children_by_node(nodes)
    longest = max((node["end"] for node in nodes), default=0)
    rows: list[list[dict[str, Any]]] = []
    waiting: list[tuple[int, int | None]] = [(n, None) for n in reversed(children.get(None, []))]
    while waiting:
        first, parent_row = waiting.pop()
        row: list[dict[str, Any]] = []
        place: int | None = first
        while place is not None:
            row.append(_bar(nodes[place], longest))
            below = children.get(place, [])
            waiting += [(n, len(rows)) for n in reversed(below[1:])]
            place = below[0] if below else None
        if parent_row is not None:
            row[0]["rise"] = f"{ROW_HEIGHT * (len(rows) - parent_row)}px"
        rows.append(row)
    account = snapshot["account"]
    kept = sum(node["bytes"] for node in nodes)
    return {
        "rows": rows[:MOST_ROWS],
        "left_out": f"{len(rows) - MOST_ROWS:,} more" if len(rows) > MOST_ROWS else "",
        "ticks": [
            {"left": f"{25 * i}%", "text": f"{longest * i // 4:,}"} for i in range(5 if longest >= 4 else 0)
        ],
        "text": f"{account['checkpoints']:,} checkpoints, {size_text(kept)} with their pages; policy "
        f"{snapshot['policy']}; {account['saved']:,} saved and {account['evicted']:,} evicted so far",
    }


def _bar(node: dict[str, Any], longest: int) -> dict[str, Any]:
    start, end, checkpoint = node["start"], node["end"], node["checkpoint"]
    parts = [f"tokens {start:,} to {end:,}"]
    if checkpoint is not None:
        hits = checkpoint["hits"]
        parts.append(f"checkpoint at {end:,} ({checkpoint['kind']}), {hits:,} {plural('hit', hits)}")
    elif node["lost"]:
        parts.append(f"no checkpoint: {node['lost'].replace('_', ' ')}")
    if node["running"]:
        parts.append(f"{node['running']:,} running")
    if node["bytes"]:
        parts.append(size_text(node["bytes"]))
    return {
        "left": f"{100 * start / longest:.3f}%",
        "width": f"{100 * (end - start) / longest:.3f}%",
        "rise": None,
        "checkpoint": checkpoint is not None,
        "hits": 0 if checkpoint is None else checkpoint["hits"],
        "running": node["running"],
        "text": "; ".join(parts),
    }
