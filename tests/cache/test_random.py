"""All operations of the cache together, in any order, against an oracle that only knows what was saved."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from denim.cache.positions import KINDS
from denim.cache.prefix_cache import Namespace
from tests.cache.memory import Running, World
from tests.memory.layouts import make_layout

SPACES = [Namespace(), Namespace(), Namespace(), Namespace("a"), Namespace(None, 7)]
# Few symbols and short stems: prompts share prefixes, split edges, end inside pages and on their borders.
STEMS = [[0] * 9, [0, 1] * 6, [0, 0, 0, 0, 1, 1, 1, 1], [2] * 17]
prompts = st.builds(
    lambda stem, keep, tail: [*stem[: len(stem) - keep], *tail],
    st.sampled_from(STEMS),
    st.integers(0, 5),
    st.lists(st.integers(0, 2), min_size=1, max_size=9),
)
places = st.integers(0, 1000)


class CacheMachine(RuleBasedStateMachine):
    """`places` choose among what there is; where there is nothing, nothing happens."""

    @initialize(
        slabs=st.integers(3, 14),
        slots=st.sampled_from([1, 2]),
        order=st.sampled_from(["lru", "greedy dual", "expected"]),
        ids_limit=st.sampled_from([0, 10, 60, 1000]),
        attention=st.sampled_from([True, True, False]),
    )
    def open(self, slabs: int, slots: int, order: str, ids_limit: int, attention: bool) -> None:
        layout = make_layout(pages=4 if attention else 0, slots=slots)
        self.world = World(slabs, order=order, layout=layout, ids_limit=ids_limit)
        self.running: list[Running] = []

    @rule(tokens=prompts, space=st.sampled_from(SPACES), at=places, save=st.booleans(), donate=st.booleans())
    def request(self, tokens: list[int], space: Namespace, at: int, save: bool, donate: bool) -> None:
        """One from begin to end, with a checkpoint on the way."""
        request = self.world.begin(tokens, space)
        if request is None:
            return
        self.world.compute(request, request.computed + 1 + at % (len(tokens) - request.computed))
        if save:
            self.world.save(request, KINDS[at % len(KINDS)])
        self.world.compute(request, len(tokens))
        self.world.finish(request, donate)

    @rule(tokens=prompts, space=st.sampled_from(SPACES))
    def begin(self, tokens: list[int], space: Namespace) -> None:
        if (request := self.world.begin(tokens, space)) is not None:
            self.running.append(request)

    @rule(which=places, at=places, save=st.booleans())
    def go_on(self, which: int, at: int, save: bool) -> None:
        if self.running:
            request = self.running[which % len(self.running)]
            self.world.compute(request, request.computed + at % (1 + len(request.tokens) - request.computed))
            if save and request.computed:
                self.world.save(request, KINDS[at % len(KINDS)])

    @rule(which=places, donate=st.booleans())
    def end(self, which: int, donate: bool) -> None:
        if self.running:
            self.world.finish(self.running.pop(which % len(self.running)), donate)

    @rule(which=places, seconds=st.floats(0, 1000))
    def evict(self, which: int, seconds: float) -> None:
        """The order's choice, or any."""
        self.world.clock.now += seconds
        standing = [node for node in self.world.cache.tree.nodes() if node.checkpoint is not None]
        victim = self.world.order.victim(keep=None)
        assert (victim is not None) == bool(standing)
        if victim is not None:
            self.world.cache.evict(victim if which % 2 else standing[which % len(standing)])

    @rule(which=places)
    def reset(self, which: int) -> None:
        if which > 900:
            self.world.cache.reset()
            assert self.world.cache.tree.checkpoints == 0

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check(self.running)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            close(self.world, self.running)


def close(world: World, running: list[Running]) -> None:
    """With everything ended and forgotten, nothing is held."""
    for request in running:
        world.finish(request, donate=False)
    world.cache.reset()
    world.check()
    assert all(counts["used"] == 0 for counts in world.arena.stats().values())


class LongCacheMachine(CacheMachine):
    pass


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestCacheLong = pytest.mark.slow(LongCacheMachine.TestCase)
TestCacheLong.settings = settings(max_examples=400, stateful_step_count=120, deadline=None)


def drive(seed: int, steps: int) -> int:
    """Random operations in proportions in which requests mostly hit; returns the number of hits."""
    chance = random.Random(seed)
    layout = make_layout(pages=chance.choice([4, 4, 4, 0]), slots=chance.choice([1, 2]))
    order = chance.choice(["lru", "greedy dual", "expected"])
    world = World(
        chance.choice([4, 8, 16, 40]), order=order, layout=layout, ids_limit=chance.choice([20, 500])
    )
    running: list[Running] = []
    ended: list[list[int]] = []
    hits = 0
    for _ in range(steps):
        world.clock.now += chance.expovariate(1 / 20)
        action = chance.random()
        if action < 0.35:
            stem = chance.choice([*STEMS, *ended])
            keep = len(stem) - chance.choice([0, 0, 1, 2, len(stem)])
            tail = [chance.randrange(3) for _ in range(chance.randrange(1, 6))]
            request = world.begin([*stem[: max(0, keep)], *tail][:40], chance.choice(SPACES))
            if request is not None:
                running.append(request)
                hits += request.hit.position > 0
        elif action < 0.7 and running:
            request = chance.choice(running)
            world.compute(request, chance.randint(request.computed, len(request.tokens)))
            if request.computed and chance.random() < 0.6:
                world.save(request, chance.choice(KINDS))
        elif action < 0.98 and running:
            request = running.pop(chance.randrange(len(running)))
            world.compute(request, chance.choice([request.computed, len(request.tokens)]))
            world.finish(request, donate=chance.random() < 0.8)
            ended = [*ended[-5:], list(request.tokens)]
        elif action > 0.995:
            world.cache.reset()
        world.check(running)
    close(world, running)
    return hits


@pytest.mark.parametrize("seed", range(12))
def test_random_operations(seed: int) -> None:
    drive(seed, steps=250)


def test_random_operations_do_hit() -> None:
    assert sum(drive(100 + seed, steps=200) for seed in range(5)) > 25


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 260))
def test_many_random_operations(seed: int) -> None:
    drive(seed, steps=1500)
