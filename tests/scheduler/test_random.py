"""Random arrivals, aborts, stops, preemptions, priorities and forks in tiny arenas.

What must hold after every step is in `ToyEngine`; here is what happens, and that at the end every token was
right and nothing is left.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from denim.errors import RequestError
from denim.scheduler.request import Family
from tests.memory.layouts import make_layout
from tests.scheduler.toy import VOCABULARY, ToyEngine

LAYOUTS = [(5, 1), (3, 2), (1, 4), (2, 1), (4, 0), (0, 2)]
SWAP_BYTES = [0, 4_000, 20_000, 10**9]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        layout=st.sampled_from(LAYOUTS),
        num_slabs=st.integers(2, 8),
        swap_bytes=st.sampled_from(SWAP_BYTES),
        recompute_below=st.sampled_from([0, 8, 1000]),
        chunk_size=st.sampled_from([1, 4, 8]),
        max_num_seqs=st.integers(1, 8),
        max_num_batched_tokens=st.sampled_from([1, 2, 3, 6, 12, 40]),
    )
    def start(self, layout, **options):
        self.engine = ToyEngine(layout=make_layout(*layout), **options)
        self.out = []  # plans that have begun, the older first

    @rule(
        prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=22),
        max_tokens=st.integers(1, 16),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
    )
    def add(self, prompt, max_tokens, priority, n, prompt_logprobs):
        family = Family() if n > 1 else None
        for i in range(n):
            try:
                self.engine.add(prompt, max_tokens, i, priority, family, None if i else prompt_logprobs)
            except RequestError:
                assert len(prompt) + max_tokens > self.engine.longest_request()

    @precondition(lambda self: len(self.out) < 2)
    @rule()
    def begin(self):
        plan = self.engine.begin()
        if plan is not None:
            self.out.append(plan)

    @precondition(lambda self: self.out)
    @rule()
    def complete(self):
        self.engine.complete(self.out.pop(0))

    @precondition(lambda self: not self.out)
    @rule(n=st.integers(1, 12))
    def steps(self, n):
        for _ in range(n):
            self.engine.step()

    @rule(n=st.integers(1, 12))
    def overlapped_steps(self, n):
        """Each step begins before the outcome of the one before it is known."""
        for _ in range(n):
            if len(self.out) == 2:
                self.complete()
            self.begin()

    @rule(name=st.sampled_from(["page", "slot"]))
    def shake(self, name):
        """Entries move between any two steps."""
        if self.engine.arena.layout.has(name):
            self.engine.shake(name)
            self.engine.scheduler.check()

    @precondition(lambda self: self.out)
    @rule()
    def fail(self):
        """The device lost a step: who was in it ends, the others go on."""
        self.engine.fail(self.out.pop(0))

    @precondition(lambda self: self.engine.scheduler.requests)
    @rule(data=st.data(), reason=st.sampled_from(["abort", "stop"]))
    def finish(self, data, reason):
        request_id = data.draw(st.sampled_from(sorted(self.engine.scheduler.requests)))
        assert self.engine.scheduler.finish(request_id, reason)
        assert not self.engine.scheduler.finish(request_id, reason)
        self.engine.scheduler.check()

    def teardown(self):
        if hasattr(self, "engine"):
            while self.out:
                self.complete()
            self.engine.drain()
            self.engine.check_exact()
            self.engine.check_empty()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=250, stateful_step_count=30, deadline=None)


def soak(seed: int, arrivals: int) -> ToyEngine:
    rng = random.Random(seed)
    engine = ToyEngine(
        num_slabs=rng.randint(4, 12),
        swap_bytes=rng.choice(SWAP_BYTES),
        recompute_below=rng.choice([0, 10, 1000]),
        layout=make_layout(*rng.choice(LAYOUTS[:4])),
        max_num_seqs=rng.randint(2, 12),
        max_num_batched_tokens=rng.choice([3, 8, 30]),
        chunk_size=rng.choice([1, 4, 8]),
    )
    longest = engine.longest_request()
    while len(engine.requests) < arrivals:
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, longest // 2))]
        n = rng.choice([1, 1, 1, 3])
        family = Family() if n > 1 else None
        for i in range(n):
            engine.add(
                prompt, rng.randint(1, longest - len(prompt)), i, rng.choice([0, 1]) if n == 1 else 0, family
            )
        for _ in range(rng.randint(0, 30)):
            engine.step()
            if rng.random() < 0.03 and engine.scheduler.requests:
                engine.scheduler.finish(rng.choice(list(engine.scheduler.requests)), "abort")
    engine.drain(limit=200_000)
    engine.check_exact()
    engine.check_empty()
    return engine


def test_soak():
    """Over a thousand arrivals; both ways of preemption and forks must have happened."""
    engines = [soak(seed, arrivals=100) for seed in range(12)]
    stats = [engine.scheduler.stats() for engine in engines]
    assert sum(s["preempted_swap"] for s in stats) > 50
    assert sum(s["preempted_recompute"] for s in stats) > 50
    assert sum(len(plan.page_copies) for engine in engines for plan in engine.plans) > 50


def churn(seed: int, arrivals: int) -> ToyEngine:
    """Many short requests, of which some end early, and a few long ones: free memory lies scattered, and
    between most steps entries move whether or not anybody needs it."""
    rng = random.Random(seed)
    engine = ToyEngine(
        num_slabs=rng.randint(8, 20),
        swap_bytes=rng.choice(SWAP_BYTES),
        layout=make_layout(*rng.choice([(8, 1), (5, 2), (4, 4), (8, 0), (0, 5)])),
        max_num_seqs=rng.randint(10, 80),
        max_num_batched_tokens=rng.choice([40, 200]),
    )
    names = [size.name for size in engine.arena.layout.classes]
    longest = min(engine.longest_request(), 100)
    out = []  # plans that have begun; one may be ahead of the other
    while len(engine.requests) < arrivals or engine.scheduler.requests:
        for _ in range(rng.randint(0, 6) if len(engine.requests) < arrivals else 0):
            length = longest // 2 if rng.random() < 0.1 else rng.randint(1, 12)
            prompt = [rng.randrange(VOCABULARY) for _ in range(length)]
            family = Family() if rng.random() < 0.2 else None
            for i in range(3 if family else 1):
                priority = 0 if family else rng.choice([0, 0, 1])
                engine.add(prompt, rng.randint(1, min(40, longest - length)), i, priority, family)
        for _ in range(rng.randint(1, 4)):
            if rng.random() < 0.5:
                engine.shake(rng.choice(names))
            plan = engine.begin()
            out += [plan] if plan is not None else []
            while len(out) > (plan is not None and rng.random() < 0.5):
                engine.complete(out.pop(0))
        if rng.random() < 0.2 and engine.scheduler.requests:
            engine.scheduler.finish(rng.choice(list(engine.scheduler.requests)), "abort")
    engine.check_exact()
    engine.check_empty()
    return engine


def test_entries_move_under_running_requests():
    plans = [plan for seed in range(12) for plan in churn(seed, arrivals=150).plans]
    moved = [plan for plan in plans if plan.moves]
    assert sum(len(plan.moves) for plan in moved) > 500
    assert {move.name for plan in moved for move in plan.moves} == {"page", "slot"}
    for kind in ("swap_out", "swap_in", "page_copies"):
        assert any(getattr(plan, kind) for plan in moved), f"no move in a step with {kind}"


def starve(seed: int, arrivals: int) -> ToyEngine:
    """An arena of one request's size, or a little more, in which whatever is optional fails at random: room
    in swap space, and moves of entries."""
    rng = random.Random(seed)
    layout = make_layout(*rng.choice([*LAYOUTS, (8, 1), (5, 2), (4, 4)]))
    longest = rng.randint(4, 60)
    engine = ToyEngine(
        num_slabs=layout.slabs_for(layout.need(longest)) + rng.choice([0, 0, 1, 2, 5]),
        swap_bytes=rng.choice(SWAP_BYTES),
        layout=layout,
        max_num_seqs=rng.choice([1, 5, 50]),
        max_num_batched_tokens=rng.choice([1, 7, 100]),
    )
    compactor = engine.scheduler._holdings.compactor
    reserve, make_room = engine.swap.reserve, compactor.make_room
    engine.swap.reserve = lambda *args: rng.random() < 0.5 and reserve(*args)
    compactor.make_room = lambda need: (
        engine.arena.can_alloc(need) or (rng.random() < 0.5 and make_room(need))
    )
    while len(engine.requests) < arrivals:
        for _ in range(rng.randint(1, 5)):
            prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, longest - 1))]
            family = Family() if rng.random() < 0.2 else None
            for i in range(3 if family else 1):
                priority = 0 if family else rng.choice([0, 0, 1])
                engine.add(prompt, rng.randint(1, longest - len(prompt)), i, priority, family)
        for _ in range(rng.randint(1, 10)):
            engine.step()
    engine.drain(limit=200_000)
    engine.check_exact()
    engine.check_empty()
    assert all(request.finish_reason == "length" for request in engine.requests.values())
    return engine


def test_shortage():
    """Everyone gets to the end, in order, whatever is short: `ToyEngine` checks the order in every step."""
    stats = [starve(seed, arrivals=30).scheduler.stats() for seed in range(40)]
    assert sum(s["preempted_swap"] for s in stats) > 5
    assert sum(s["preempted_recompute"] for s in stats) > 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_long_soak(seed):
    soak(seed, arrivals=400)
    churn(seed, arrivals=1000)
    starve(seed, arrivals=300)
