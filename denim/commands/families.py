"""`denim families`: what can be served.

Owns how the registry is shown: as a table for people, or as the Markdown that the README holds.
"""

from __future__ import annotations

from denim.models.registry import all_families

BEGIN, END = "<!-- denim families -->", "<!-- end -->"


def rows() -> list[tuple[str, str, str]]:
    """(title, a spec's `family`, what it consists of), by title."""
    return sorted((family.title, name, family.note) for name, family in all_families().items())


def markdown() -> str:
    lines = ["| family | `model_type` | made of |", "|---|---|---|"]
    lines += [f"| {title} | `{name}` | {note} |" for title, name, note in rows()]
    return "\n".join(lines)


def show_families(as_markdown: bool) -> None:
    """Print the families."""
    if as_markdown:
        print(markdown())
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("family", "model_type", "made of", box=None, padding=(0, 2, 0, 0))
    for row in rows():
        table.add_row(*row)
    Console(highlight=False).print(table)
