"""Scheduler, prefix cache and host tier together, over memory whose content shows every mistake."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from denim.cache.prefix_cache import Namespace
from denim.scheduler.request import Family
from tests.memory.layouts import make_layout
from tests.scheduler.test_prefixes import chatter, prompt_of, run
from tests.scheduler.toy import ToyEngine

HOST = 10**6


def engine_of(**options: Any) -> ToyEngine:
    return ToyEngine(**{"num_slabs": 60, "policy": "auto", "max_num_seqs": 20, "host_bytes": HOST, **options})


def push_out(engine: ToyEngine) -> None:
    """Everything that the device's cache holds leaves it, with the step of a request that stores nothing."""
    cache = engine.scheduler.prefixes.cache
    cache.evict_all()
    run(engine, [96, 96], 1, store=False)
    assert cache.tree.checkpoints == 0


def host_stats(engine: ToyEngine) -> dict[str, int]:
    return engine.scheduler.prefixes.tier_stats()["host"]


@pytest.mark.parametrize("delay", [0, 1, 5])
@pytest.mark.parametrize("layout", [(5, 1), (3, 2), (4, 0), (0, 2)])
@pytest.mark.parametrize("length", [2, 3, 4, 5, 8, 9, 17])
def test_pushed_out_and_back_again(length: int, layout: tuple[int, int], delay: int) -> None:
    engine = engine_of(layout=make_layout(*layout), delay=delay)
    prompt = prompt_of(length)
    run(engine, prompt)
    push_out(engine)
    again = run(engine, prompt)
    assert again.reuse.cached == length - 1
    assert host_stats(engine)["loaded_tokens"] == length - 1
    engine.check_empty()


def test_only_what_the_device_lacks_comes_up() -> None:
    """Pages of a path that the device still has are shared: of a checkpoint on the way only its slot comes.
    Nothing goes out twice."""
    engine = engine_of(policy="ends")
    prompt = prompt_of(39)
    run(engine, prompt)  # leaves checkpoints after 38 and 43 tokens
    cache = engine.scheduler.prefixes.cache
    (node,) = [node for node in cache.tree.nodes() if node.checkpoint is not None and node.end == 38]
    cache.evict(node)
    assert run(engine, [*prompt[:38], 96, 96], 1, store=False).reuse.cached == 38
    (load,) = [load for plan in engine.plans for load in plan.loads]
    assert len(load.pages) == 0 and load.slot >= 0
    push_out(engine)
    stores = [store for plan in engine.plans for store in plan.stores]
    assert [len(store.pages) for store in stores] == [10, 2]  # positions 0 .. 37, and 36 .. 42
    engine.check_exact()
    engine.check_empty()


def test_others_pass_a_request_whose_prefix_is_on_its_way() -> None:
    engine = engine_of(delay=9)
    prompt = prompt_of(20)
    run(engine, prompt)
    push_out(engine)
    waiting = engine.add(prompt, 3)
    other = engine.add(prompt_of(20, 5), 3)
    for _ in range(6):
        engine.step()
    assert other.finish_reason == "length" and waiting.computed == 0
    engine.drain()
    engine.check_exact()
    assert waiting.reuse.cached == 19


def test_prefixes_come_up_while_their_requests_wait() -> None:
    """With one seat, taken for a while, all is there when it comes to be free."""
    engine = engine_of(delay=4, max_num_seqs=1)
    prompts = [prompt_of(20, seed) for seed in range(3)]
    for prompt in prompts:
        run(engine, prompt)
    push_out(engine)
    busy = engine.add(prompt_of(9, 9), 20)
    engine.step()
    waiting = [engine.add(prompt, 3) for prompt in prompts]
    while busy.finish_reason is None:
        engine.step()
    assert host_stats(engine)["loaded"] == 3
    before = len(engine.plans)
    engine.drain()
    engine.check_exact()
    assert [request.reuse.cached for request in waiting] == [19] * 3
    assert len(engine.plans) - before == 9, "somebody waited once more"


def test_siblings_wait_for_one_load() -> None:
    """PN-10: all of those that share what comes up."""
    engine = engine_of(delay=3)
    shared = prompt_of(30)
    run(engine, shared)
    push_out(engine)
    requests = [engine.add([*shared[:29], i, i], 4) for i in range(8)]
    engine.drain()
    engine.check_exact()
    assert [request.reuse.cached for request in requests] == [29] * 8
    assert sum(len(plan.loads) for plan in engine.plans) == 1
    engine.check_empty()


@pytest.mark.parametrize("delay", [0, 3])
def test_a_family_begins_from_host_memory(delay: int) -> None:
    engine = engine_of(delay=delay)
    run(engine, prompt_of(12))
    push_out(engine)
    family = Family()
    members = [engine.add(prompt_of(12), 4, i, family=family) for i in range(4)]
    engine.drain()
    engine.check_exact()
    assert members[0].reuse.cached == 11
    engine.check_empty()


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_aborted_while_it_comes_up(steps: int) -> None:
    """What was asked for lands all the same, and is there for the next."""
    engine = engine_of(delay=2)
    prompt = prompt_of(20)
    run(engine, prompt)
    push_out(engine)
    request = engine.add(prompt, 3)
    for _ in range(steps):
        engine.step()
    engine.scheduler.finish(request.id, "abort")
    engine.scheduler.check()
    assert run(engine, prompt).reuse.cached == 19
    assert host_stats(engine)["loaded"] == 1
    engine.check_empty()


def test_a_step_that_fails_while_something_comes_up() -> None:
    engine = engine_of(delay=2)
    prompt = prompt_of(20)
    run(engine, prompt)
    push_out(engine)
    waiting = engine.add(prompt, 3)
    engine.add(prompt_of(8, 3), 9)
    plan = engine.begin()
    assert plan.loads and plan.spans
    engine.fail(plan)
    engine.drain()
    assert waiting.reuse.cached == 0, "a step that fails empties all memory"
    assert run(engine, prompt).reuse.cached == 19
    engine.check_exact()
    engine.check_empty()


def test_entries_move_while_they_are_landed_on() -> None:
    engine = engine_of(delay=3, layout=make_layout(3, 2), num_slabs=30)
    prompt = prompt_of(40)
    run(engine, prompt)
    push_out(engine)
    busy = engine.add(prompt_of(9, 9), 30)
    request = engine.add(prompt, 3)
    for _ in range(4):
        engine.step()
        engine.shake("slot")
        engine.shake("page")
    engine.drain()
    engine.check_exact()
    assert request.reuse.cached == 39 and busy.finish_reason == "length"
    engine.check_empty()


def test_what_is_wrong_goes_from_host_memory_too() -> None:
    """DS-08: a request fails after its checkpoint was pushed out, or while it comes back."""
    for delay in (0, 5):
        engine = engine_of(delay=delay)
        run(engine, prompt_of(12))
        push_out(engine)
        failing = engine.add(prompt_of(12), 5)
        while not failing.computed:
            engine.step()
        cache = engine.scheduler.prefixes.cache
        assert failing.reuse.cached == 11
        cache.evict_all()
        engine.scheduler.finish(failing.id, "error")
        assert run(engine, prompt_of(12)).reuse.cached == 0
        engine.check_exact()
        engine.check_empty()


def test_what_turns_out_wrong_on_its_way_up_is_not_begun_from() -> None:
    """DS-08: its last reader fails while it comes up for another."""
    engine = engine_of(delay=9)
    run(engine, prompt_of(12))
    failing = engine.add(prompt_of(12), 20)
    engine.step()
    assert failing.reuse.cached == 11
    engine.scheduler.prefixes.cache.evict_all()
    engine.step()
    waiting = engine.add(prompt_of(12), 3)
    engine.step()
    assert engine.scheduler.prefixes.awaited
    engine.scheduler.finish(failing.id, "error")
    engine.drain()
    assert waiting.reuse.cached == 0
    engine.check_exact()
    engine.check_empty()


def test_salts_are_apart_there_too() -> None:
    """LO-06: sequences of another namespace find nothing in any tier."""
    engine = engine_of()
    for space in (Namespace("a"), Namespace(None, "adapter")):
        run(engine, prompt_of(12), namespace=space)
    push_out(engine)
    for space, cached in ((Namespace("b"), 0), (Namespace("a", "adapter"), 0), (Namespace("a"), 11)):
        assert run(engine, prompt_of(12), namespace=space, store=False).reuse.cached == cached


def test_a_refused_checkpoint_is_rather_pushed_out() -> None:
    """Where what leaves is not lost, nothing that is wanted is turned down for want of room."""
    engine = engine_of(num_slabs=6)
    prompts = [prompt_of(16, seed) for seed in range(8)]
    for prompt in prompts:
        run(engine, prompt)
    assert [run(engine, prompt, store=False).reuse.cached for prompt in prompts] == [15] * 8
    assert engine.scheduler.prefixes.stats()["refused"] == 0
    engine.check_empty()


def test_little_host_memory_keeps_what_is_worth_most() -> None:
    engine = engine_of(host_bytes=256 * 60, num_slabs=20)
    for seed in range(12):
        run(engine, prompt_of(16, seed))
    stats = host_stats(engine)
    assert stats["evicted"] + stats["refused"] > 0 and stats["used_bytes"] <= stats["total_bytes"]
    engine.scheduler.check()
    engine.check_empty()


def test_tokens_that_are_there_and_were_not_loaded_are_counted() -> None:
    engine = engine_of()
    prompt = prompt_of(20)
    run(engine, prompt)
    push_out(engine)
    engine.scheduler.prefixes.tiers.pays = lambda start, end, nbytes, tier: False
    assert run(engine, prompt).reuse.cached == 0
    assert engine.scheduler.prefixes.stats()["lost"]["not_loaded"] == 19


def test_everything_at_once_with_a_host_tier() -> None:
    total: Counter[str] = Counter()
    for seed in range(16):
        rng = random.Random(seed)
        host_bytes = rng.choice([2000, 20_000, HOST])
        total += chatter(seed, arrivals=60, host_bytes=host_bytes, delay=rng.choice([0, 1, 2, 5]))[1]
    for name in ("host loaded", "host stored", "host evicted", "moves", "preempted_swap", "evicted"):
        assert total[name] > 20, f"hardly any {name}: {total}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2000, 2060))
def test_everything_at_once_for_long(seed: int) -> None:
    rng = random.Random(seed)
    chatter(seed, 300, host_bytes=rng.choice([2000, 20_000, HOST]), delay=rng.choice([0, 1, 2, 5]))
