"""All operations of the cache together, in any order, against an oracle that only knows what was saved."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from denim.cache.prefix_cache import Namespace
from tests.cache.memory import Running, World, make_layout

SPACES = [Namespace(), Namespace("a"), Namespace(None, 7)]
# Few symbols and short stems: prompts share prefixes, split edges, end inside pages and on their borders.
STEMS = [[0] * 9, [0, 1] * 6, [0, 0, 0, 0, 1, 1, 1, 1], [2] * 17]
tails = st.lists(st.integers(0, 2), max_size=9)


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        slabs=st.integers(3, 14),
        slots=st.sampled_from([1, 2]),
        order=st.sampled_from(["lru", "greedy dual", "expected"]),
        ids_limit=st.sampled_from([0, 10, 60, 1000]),
        attention=st.booleans(),
    )
    def open(self, slabs: int, slots: int, order: str, ids_limit: int, attention: bool) -> None:
        layout = make_layout(pages=4 if attention else 0, slots=slots)
        self.world = World(slabs, order=order, layout=layout, ids_limit=ids_limit)
        self.running: list[Running] = []

    @rule(stem=st.sampled_from(STEMS), keep=st.integers(0, 17), tail=tails, space=st.sampled_from(SPACES))
    def begin(self, stem: list[int], keep: int, tail: list[int], space: Namespace) -> None:
        tokens = stem[:keep] + tail
        if tokens and (request := self.world.begin(tokens, space)) is not None:
            self.running.append(request)

    @rule(seconds=st.floats(0, 1000))
    def wait(self, seconds: float) -> None:
        self.world.clock.now += seconds

    @precondition(lambda self: self.running)
    @rule(data=st.data(), save=st.booleans())
    def go_on(self, data: st.DataObject, save: bool) -> None:
        request = data.draw(st.sampled_from(self.running))
        end = data.draw(st.integers(request.computed, len(request.tokens)))
        self.world.compute(request, end)
        if save and end:
            self.world.save(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), donate=st.booleans())
    def end(self, data: st.DataObject, donate: bool) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        self.world.finish(request, donate)

    @rule()
    def evict(self) -> None:
        victim = self.world.order.victim(keep=None)
        if victim is not None:
            self.world.cache.evict(victim)

    @rule()
    def reset(self) -> None:
        self.world.cache.reset()
        assert self.world.cache.tree.checkpoints == 0

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check(self.running)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for request in self.running:
            self.world.finish(request, donate=False)
        self.world.cache.reset()
        self.world.check()
        assert all(counts["used"] == 0 for counts in self.world.arena.stats().values())


class LongCacheMachine(CacheMachine):
    pass


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCacheLong = pytest.mark.slow(LongCacheMachine.TestCase)
TestCacheLong.settings = settings(max_examples=400, stateful_step_count=120, deadline=None)
