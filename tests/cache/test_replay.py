from __future__ import annotations

import pytest

from denim.cache.node import as_tokens
from denim.cache.replay import Clock, TraceRequest, replay
from denim.memory.layout import PAGE, SLOT
from tests.cache.memory import World
from tests.memory.layouts import make_layout


def chat(sessions: int, turns: int) -> list[TraceRequest]:
    requests = []
    for session in range(sessions):
        history: list[int] = []
        for turn in range(turns):
            prompt = [*history, *[1000 * session + turn] * 5]
            history = [*prompt, *[500 + 1000 * session + turn] * 3]
            requests.append(TraceRequest(turn * 60.0 + session, as_tokens(history), len(prompt)))
    return sorted(requests, key=lambda request: request.time)


@pytest.mark.parametrize(("pages", "slots"), [(4, 1), (0, 1), (4, 0)])
def test_with_room_every_turn_reuses_all_that_was_applied(pages: int, slots: int) -> None:
    world = World(num_slabs=400, layout=make_layout(pages, slots))
    trace = chat(sessions=3, turns=5)
    replay(trace, world.cache, world.arena, Clock())
    world.cache.check()
    stats = world.cache.stats()
    assert stats["queries"] == 15
    assert stats["hit_tokens"] == 3 * sum(8 * turn - 1 for turn in range(1, 5))
    assert stats["query_tokens"] == sum(request.prompt for request in trace)


@pytest.mark.parametrize("policy", ["none", "align", "all", "ends", "auto"])
@pytest.mark.parametrize("slabs", [1, 2, 3, 8, 30])
def test_no_memory_is_too_little(policy: str, slabs: int) -> None:
    world = World(num_slabs=slabs, policy=policy)
    replay(chat(sessions=4, turns=6), world.cache, world.arena, Clock())
    world.cache.check()
    held = world.cache.tree.held()
    stats = world.arena.stats()
    assert (stats["pages"]["used"], stats["slots"]["used"]) == (len(held[PAGE]), len(held[SLOT]))
    assert policy != "none" or stats["slabs"]["used"] == 0
