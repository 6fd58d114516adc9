"""Tables on terminals that are too narrow for them."""

from __future__ import annotations

import io

import pytest
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from denim.commands.tables import print_table


@pytest.mark.parametrize("columns", [10, 20, 40, 60, 80, 100])
def test_no_word_is_cut(columns: int) -> None:
    table = Table(box=SIMPLE_HEAD)
    rows = [["requests of", "checkpoint ÷ KV", "prefill"], ["4,096 tokens", "157,918,076", "8.01 GFLOP"]]
    for header in rows[0]:
        table.add_column(header, justify="right", no_wrap=header == "prefill")
    table.add_row(*rows[1])
    shown = io.StringIO()
    print_table(Console(file=shown, width=columns), table)
    text = shown.getvalue()
    assert "…" not in text
    for word in [*" ".join(rows[0] + rows[1][:2]).split(), rows[1][2]]:
        assert word in text, word
