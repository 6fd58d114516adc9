"""Tables of numbers on terminals of any width.

Owns how a table is shown that is wider than the terminal. Knows nothing of what is in it.
"""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

UNBOUNDED = 10_000  # columns of text: more than any table has


def print_table(console: Console, table: Table) -> None:
    """Cells wrap between words, and no word is cut: a number without its end is another number. A terminal
    that is narrower than that folds the lines itself."""
    roomy = console.options.update(width=UNBOUNDED)
    for column in table.columns:
        cells = [Measurement.get(console, roomy, cell) for cell in (column.header, *column.cells)]
        column.min_width = max(cell.maximum if column.no_wrap else cell.minimum for cell in cells)
    terminal = console.width
    console.width = max(terminal, Measurement.get(console, roomy, table).minimum)
    try:
        console.print(table, crop=False)
    finally:
        console.width = terminal
