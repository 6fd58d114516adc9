"""Rows that come again: when a plan's decode rows are those of the plan before, one token further."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from denim.memory.layout import PAGE
from tests.memory.layouts import PAGE_SIZE
from tests.scheduler.toy import ToyEngine


def decoding(max_tokens: int = 40) -> ToyEngine:
    """Two requests that decode, after a step with nothing else in it."""
    engine = ToyEngine(num_slabs=20)
    for seed in range(2):
        engine.add([7 + seed, 3, 5], max_tokens, seed)
    for _ in range(3):
        engine.step()
    assert engine.plans[-1].rows.request_ids == (0, 1)
    return engine


def comes_again(engine: ToyEngine) -> bool:
    """Whether the next plan has the columns of the last."""
    before = engine.plans[-1].rows
    engine.step()
    rows = engine.plans[-1].rows
    assert all(request.pages is pages for request, pages in _held(engine))
    return rows.request_ids is before.request_ids and rows.pages is before.pages


def _held(engine: ToyEngine) -> list:
    """The running requests of the last plan's rows, and the tables that the plan names for them."""
    rows = engine.plans[-1].rows
    requests = [engine.scheduler.requests.get(id_) for id_ in rows.request_ids]
    return [(r, pages) for r, pages in zip(requests, rows.pages, strict=True) if r is not None]


def test_rows_come_again_while_nothing_else_happens() -> None:
    engine = decoding()
    for step in range(2 * PAGE_SIZE):  # tables grow meanwhile
        starts = list(engine.plans[-1].rows.starts)
        assert comes_again(engine), step
        assert list(engine.plans[-1].rows.starts) == [start + 1 for start in starts]
    engine.drain()
    engine.check_exact()


EVENTS: dict[str, Callable[[ToyEngine], object]] = {
    "one ends": lambda engine: engine.scheduler.finish(1, "abort"),
    "one comes": lambda engine: engine.add([1, 2], 9, 5),
    "entries have moved": lambda engine: engine.scheduler.moved(PAGE, {}),
}


@pytest.mark.parametrize("event", list(EVENTS))
def test_rows_are_dealt_anew_after(event: str) -> None:
    engine = decoding()
    assert comes_again(engine)
    EVENTS[event](engine)
    assert not comes_again(engine)
    engine.drain()


def test_who_has_all_its_tokens_is_no_row_any_more() -> None:
    """With two plans out at once the host learns of an end one step late; nobody runs past it."""
    engine = ToyEngine(num_slabs=20)
    for seed, tokens in enumerate((6, 9)):
        engine.add([7 + seed, 3, 5], tokens, seed)
    out = [engine.begin()]
    while engine.scheduler.requests:
        out.append(engine.begin())
        if (plan := out.pop(0)) is not None:
            engine.complete(plan)
    rows = [plan.rows.request_ids for plan in engine.plans if not plan.others]
    assert rows == [(0, 1)] * 5 + [(1,)] * 3
    engine.check_exact()
