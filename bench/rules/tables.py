"""Rows of measurements: what a row says, and how a table of them is printed.

Owns the row alone. Knows neither kernels nor the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple


class Row(NamedTuple):
    """One measurement. section, shape: which table and line; name: the column; microseconds: NaN where it
    could not run, then `note` says why; floor: microseconds that nothing goes below, or None."""

    section: str
    shape: str
    name: str
    microseconds: float
    floor: float | None = None
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        known = None if math.isnan(self.microseconds) else round(self.microseconds, 3)
        over = None if known is None or not self.floor else round(known / self.floor, 3)
        floor = None if self.floor is None else round(self.floor, 3)
        return {**self._asdict(), "microseconds": known, "floor": floor, "over_floor": over}


def lines(rows: Iterable[Row]) -> Iterator[str]:
    """A table for each section: a line a shape, a column a name, times over the floor in brackets."""
    sections: dict[str, list[Row]] = {}
    for row in rows:
        sections.setdefault(row.section, []).append(row)
    for section, members in sections.items():
        names = list(dict.fromkeys(row.name for row in members))
        shapes = list(dict.fromkeys(row.shape for row in members))
        at = {(row.shape, row.name): row for row in members}
        body = [[section, *names]]
        body += [[shape, *(_cell(at.get((shape, name))) for name in names)] for shape in shapes]
        widths = [max(map(len, column)) for column in zip(*body, strict=True)]
        yield from ("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in body)
        yield from sorted({f"  {row.name}: {row.note}" for row in members if row.note})
        yield ""


def prompt_shape(tokens: int, sequences: int) -> str:
    """The line of a prefill: "2048", or "16 × 2048"."""
    return str(tokens) if sequences == 1 else f"{sequences} × {tokens}"


def _cell(row: Row | None) -> str:
    if row is None or math.isnan(row.microseconds):
        return "-"
    over = f" ({row.microseconds / row.floor:.2f})" if row.floor else ""
    return f"{row.microseconds:.4g}{over}"
