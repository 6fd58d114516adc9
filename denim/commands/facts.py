"""A list of facts as people read it: a title and a text a line."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print (title, text) in two columns; long texts are folded, titles never."""
    grid = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for title, text in facts:
        grid.add_row(title, escape(text))
    Console(highlight=False).print(grid)
