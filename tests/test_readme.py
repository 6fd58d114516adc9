"""What the README says of the code is generated from it."""

from __future__ import annotations

from pathlib import Path

from denim.commands.families import BEGIN, END, markdown

README = Path(__file__).parents[1] / "README.md"


def test_the_table_of_families_is_the_registry_s() -> None:
    """After a change: put the output of `denim families --markdown` between the two marks."""
    text = README.read_text(encoding="utf-8")
    table = text.partition(BEGIN)[2].partition(END)[0].strip()
    assert table == markdown()
