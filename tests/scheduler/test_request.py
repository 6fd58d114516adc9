"""The record of a request: which of its tokens are known."""

from __future__ import annotations

from denim.cache.node import tokens_of
from denim.scheduler.request import UNKNOWN, Request
from tests.scheduler.toy import ToyEngine, output_of


def test_what_is_still_to_be_drawn_is_not_known() -> None:
    request = Request(0, [5, 6, 7], max_tokens=4, sampling=())
    assert request.known is request.tokens  # no copy where there is nothing to leave out
    request.tokens.extend([8, UNKNOWN, UNKNOWN])
    assert request.known.tolist() == [5, 6, 7, 8] and output_of(request) == [8, UNKNOWN, UNKNOWN]


def test_the_cache_remembers_known_tokens_alone() -> None:
    """A request is aborted while two of its tokens are on their way."""
    engine = ToyEngine(policy="auto")
    request = engine.add([*range(1, 20)], 9)
    plans = [engine.begin(), engine.begin()]
    engine.scheduler.finish(request.id, "abort")
    for plan in plans:
        engine.complete(plan)
    cached = [token for node in engine.scheduler.prefixes.cache.tree.nodes() for token in tokens_of(node)]
    assert cached and UNKNOWN not in cached
