"""The prefix tree in rows: every node once, children behind parents, checkpoints and hits as they are."""

from __future__ import annotations

from typing import Any

from denim.server.tree_rows import MOST_ROWS, ROW_HEIGHT, rows_of


def node(parent: int | None, start: int, end: int, hits: int | None = None, **more: Any) -> dict[str, Any]:
    checkpoint = None if hits is None else {"kind": "prompt end", "hits": hits}
    plain = {"namespace": 0, "pages": 1, "bytes": 1024, "below": 1, "running": 0, "lost": None}
    return {"parent": parent, "start": start, "end": end, "checkpoint": checkpoint} | plain | more


def snapshot(nodes: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "policy": "auto",
        "account": {"checkpoints": 3, "saved": 5, "evicted": 2},
        "nodes": nodes,
    }


def test_a_chain_is_one_row_and_a_branch_another() -> None:
    shown = rows_of(
        snapshot(
            [
                node(None, 0, 100, hits=4, below=4),
                node(0, 100, 200, hits=0, below=2),
                node(0, 100, 400, running=1, below=1),
                node(1, 200, 300, hits=1),
            ]
        )
    )
    assert shown is not None
    lefts = [[bar["left"] for bar in row] for row in shown["rows"]]
    assert lefts == [["0.000%", "25.000%"], ["25.000%", "50.000%"]]  # what runs goes first
    assert shown["rows"][0][1]["running"] == 1
    assert [row[0]["rise"] for row in shown["rows"]] == [None, f"{ROW_HEIGHT}px"]
    first = shown["rows"][0][0]
    assert first["text"] == "tokens 0 to 100; checkpoint at 100 (prompt end), 4 hits; 1 KiB"
    assert "(prompt end), 1 hit; " in shown["rows"][1][-1]["text"]
    assert shown["ticks"][-1] == {"left": "100%", "text": "400"}
    assert shown["text"].startswith("3 checkpoints, 4 KiB with their pages; policy auto")


def test_many_rows_are_cut_and_counted() -> None:
    shown = rows_of(snapshot([node(None, 0, 10 + i) for i in range(MOST_ROWS + 5)]))
    assert shown is not None
    assert len(shown["rows"]) == MOST_ROWS and shown["left_out"] == "5 more"


def test_why_a_checkpoint_is_missing_is_said() -> None:
    shown = rows_of(snapshot([node(None, 0, 10, lost="no_memory", bytes=0)]))
    assert shown is not None
    assert shown["rows"][0][0]["text"] == "tokens 0 to 10; no checkpoint: no memory"


def test_empty_and_absent() -> None:
    assert rows_of(None) is None
    shown = rows_of(snapshot([]))
    assert shown is not None and shown["rows"] == [] and shown["ticks"] == []
