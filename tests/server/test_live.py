"""What the dashboard is told: cells, rates and reasons, from views of an engine."""

from __future__ import annotations

from typing import Any

import pytest

from denim.cache.account import REASONS
from denim.server import live
from denim.server.live import MOST_CELLS, arena_shown, lost_shown, nice_top, requests_shown

POOL = {"total": 10, "used": 1, "cached": 2, "free": 7}


def view(sides: str, held: str) -> dict[str, Any]:
    return {
        "slabs": {"sides": sides, "held": held, "slab_bytes": 1024},
        "stats": {"slabs": POOL, "slots": POOL, "pages": POOL | {"total": 0}},
    }


def test_every_slab_is_a_cell_while_there_are_few() -> None:
    shown = arena_shown(view(".ssp.", "01950"))
    assert shown["cells"] == [["empty", 0], ["slots", 1], ["slots", 3], ["pages", 2], ["empty", 0]]
    assert shown["each"] == "one slab"
    assert {kind["key"]: kind["slabs"] for kind in shown["kinds"]} == {"slots": 2, "empty": 2}  # no pages


def test_many_slabs_share_a_cell() -> None:
    slabs = 3 * MOST_CELLS - 1
    shown = arena_shown(view("s" * (slabs - 3) + "pp.", "9" * slabs))
    assert len(shown["cells"]) == MOST_CELLS
    assert shown["each"] == "3 slabs"
    assert shown["cells"][-2:] == [["slots", 3], ["pages", 3]]


def test_every_reason_has_words() -> None:
    prefix = {"hit_tokens": 50, "lost": {reason: i for i, reason in enumerate(REASONS)}}
    shown = lost_shown(prefix)
    assert [one["key"] for one in shown] == ["reused", *REASONS]
    assert shown[0]["width"] == "100.00%" and shown[1]["width"] == "0.00%"
    assert all(one["width"] == "0%" for one in lost_shown({"hit_tokens": 0, "lost": {"evicted": 0}}))


def test_a_request_in_bars() -> None:
    one = {
        "id": "0123456789abcdef",
        "index": 1,
        "status": "running",
        "prompt": 60,
        "cached": 30,
        "computed": 62,
        "generated": 3,
        "most_tokens": 40,
        "seconds": 1.25,
        "first": 0.25,
    }
    shown = requests_shown({"total": 4, "shown": [one]})
    assert shown["rows"][0]["id"] == "01234567 · 1" and shown["more"] == "and 3 more"
    assert shown["rows"][0]["bars"] == [["cached", "30.00%"], ["computed", "30.00%"], ["generated", "3.00%"]]
    assert shown["rows"][0]["first"] == "250 ms"


@pytest.mark.parametrize(
    ("highest", "top"), [(0, 4), (4, 4), (5, 8), (9, 20), (21, 40), (999, 2000), (2001, 4000)]
)
def test_the_scale_s_end(highest: float, top: float) -> None:
    assert nice_top(highest) == top


def test_rates_are_of_the_time_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted:
        generated_tokens = 0.0

    class Served:
        metrics = Counted()

    clock = iter([10.0, 12.0, 13.0])
    monkeypatch.setattr(live.time, "monotonic", lambda: next(clock))
    viewer = live.Viewer(Served())  # type: ignore[arg-type]
    assert viewer._throughput(1000)["series"][0]["y"] == [0.0]
    Counted.generated_tokens = 20.0
    generated, applied = viewer._throughput(1100)["series"]
    assert (generated["y"], applied["y"]) == ([10.0], [50.0])
    # The engine was started anew, and counts from nothing.
    generated, applied = viewer._throughput(7)["series"]
    assert (generated["y"], applied["y"]) == ([10.0, 0.0], [50.0, 7.0])
