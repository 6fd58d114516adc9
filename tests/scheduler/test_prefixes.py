"""Scheduler and prefix cache together, over memory whose content shows every mistake (`ToyEngine`)."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from denim.cache.prefix_cache import Namespace
from denim.memory.layout import PAGE, SLOT
from denim.scheduler.request import UNKNOWN, Family, Request
from tests.memory.layouts import make_layout
from tests.scheduler.toy import VOCABULARY, ToyEngine, expected_tokens, output_of


def engine_of(policy: str = "auto", **options: Any) -> ToyEngine:
    return ToyEngine(**{"num_slabs": 60, "policy": policy, "max_num_seqs": 20, **options})


def run(engine: ToyEngine, prompt: list[int], max_tokens: int = 5, **options: Any) -> Request:
    request = engine.add(prompt, max_tokens, **options)
    engine.drain()
    engine.check_exact()
    return request


def prompt_of(length: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCABULARY) for _ in range(length)]


@pytest.mark.parametrize("layout", [(5, 1), (3, 2), (4, 0), (0, 2)])
@pytest.mark.parametrize("length", [2, 3, 4, 5, 8, 9, 17])
def test_the_same_prompt_again_computes_one_token(length: int, layout: tuple[int, int]) -> None:
    engine = engine_of(layout=make_layout(*layout))
    prompt = prompt_of(length)
    run(engine, prompt)
    before = len(engine.plans)
    again = run(engine, prompt)
    assert again.reuse.cached == length - 1
    assert sum(span.length for plan in engine.plans[before:] for span in plan.spans) == 1 + 4
    engine.check_empty()


def test_the_next_turn_begins_behind_all_that_was_applied() -> None:
    engine = engine_of()
    history, applied = prompt_of(9), 0
    for turn in range(5):
        request = run(engine, history, max_tokens=6)
        assert request.reuse.cached == applied
        applied = request.num_prompt + 5
        history = [*history, *output_of(request), *prompt_of(4, seed=turn)]
    engine.check_empty()


def test_a_boundary_hits_on_the_second_sighting_and_a_junction_on_the_third() -> None:
    shared = prompt_of(10)
    told, left_alone = engine_of(), engine_of()
    for i in range(3):
        boundary = run(told, shared + [i] * 6, boundaries=[10])
        junction = run(left_alone, shared + [i] * 6)
        assert boundary.reuse.cached == (10 if i else 0)
        assert junction.reuse.cached == (10 if i == 2 else 0)


def test_one_of_many_over_a_new_prefix_computes_it() -> None:
    """PH-03: siblings that arrive together; no state is read before it is there."""
    engine = engine_of(max_num_batched_tokens=12)
    shared = prompt_of(30)
    requests = [engine.add(shared + [i] * 5, max_tokens=4) for i in range(8)]
    engine.drain()
    engine.check_exact()
    assert [request.reuse.cached for request in requests] == [0] + [30] * 7
    assert sum(span.length for plan in engine.plans for span in plan.spans) == 30 + 8 * (5 + 3)


def test_saves_inside_a_segment_cost_no_step() -> None:
    prompt = prompt_of(40)
    steps = []
    for inside in (False, True):
        engine = engine_of(saves_inside=inside)
        run(engine, prompt, max_tokens=1, marks=[7, 20], boundaries=[30, 38])
        steps.append(len(engine.plans))
        for end in (7, 20, 30, 38):
            assert run(engine, [*prompt[:end], 96, 96], store=False).reuse.cached == end
    assert steps == [6, 1]  # one for each mark, boundary and prompt end, and the last token


def test_one_that_extends_another_waits_for_its_end() -> None:
    engine = engine_of(max_num_batched_tokens=8)
    prompt = prompt_of(30)
    first, second = engine.add(prompt, 3), engine.add([*prompt, 1, 2, 3], 3)
    engine.drain()
    engine.check_exact()
    assert (first.reuse.cached, second.reuse.cached) == (0, 29)


def test_an_urgent_request_does_not_wait_for_a_lesser_one() -> None:
    engine = engine_of(max_num_batched_tokens=8)
    prompt = prompt_of(60)
    engine.add(prompt, 3, priority=1)
    engine.step()
    urgent = engine.add(prompt, 3, priority=0)
    engine.step()
    assert urgent.computed > 0 and urgent.reuse.cached == 0
    engine.drain()
    engine.check_exact()


def test_nothing_of_a_request_that_failed_is_kept() -> None:
    """DS-08: what it saved before goes too."""
    engine = engine_of()
    request = engine.add(prompt_of(12), 10)
    for _ in range(5):
        engine.step()
    assert engine.scheduler.prefixes.cache.tree.checkpoints == 1
    engine.scheduler.finish(request.id, "error")
    engine.scheduler.check()
    assert engine.scheduler.prefixes.cache.tree.checkpoints == 0
    assert run(engine, prompt_of(12)).reuse.cached == 0


def test_a_checkpoint_that_lets_a_request_fail_goes() -> None:
    """PH-01: what is wrong in the cache does not go on failing everybody who begins there."""
    engine = engine_of()
    run(engine, prompt_of(12))
    failing = engine.add(prompt_of(12), 5)
    engine.step()
    assert failing.reuse.cached == 11
    engine.scheduler.finish(failing.id, "error")
    assert run(engine, prompt_of(12)).reuse.cached == 0


def test_what_a_last_step_spoiled_can_be_discarded() -> None:
    """The step behind a request's last one wrote to the donated slot, and its outcome comes later."""
    engine = engine_of()
    request = engine.add(prompt_of(12), 9)
    engine.step()
    last, behind = engine.begin(), engine.begin()
    engine.complete(last)
    engine.scheduler.finish(request.id, "stop")
    tree = engine.scheduler.prefixes.cache.tree
    assert [node.end for node in tree.nodes() if node.checkpoint is not None] == [11, 13]
    engine.scheduler.prefixes.discard(request.id)
    assert tree.checkpoints == 0
    engine.complete(behind)
    engine.scheduler.check()
    assert run(engine, prompt_of(12)).reuse.cached == 0


@pytest.mark.parametrize("reason", ["abort", "stop"])
def test_a_request_that_ends_early_leaves_what_it_computed(reason: str) -> None:
    engine = engine_of(max_num_batched_tokens=8)
    request = engine.add(prompt_of(30), 5)
    engine.step()
    engine.step()
    computed = request.computed
    engine.scheduler.finish(request.id, reason)
    assert 0 < computed < 29
    assert run(engine, prompt_of(30)).reuse.cached == computed


def test_a_request_ends_where_its_state_is_a_checkpoint_that_has_left() -> None:
    """Its own slot holds nothing then that could be kept."""
    engine = engine_of()
    request = engine.add(prompt_of(30), 5, marks=[20])
    while request.computed < 20:
        engine.step()
    assert request.computed == 20 and request.reuse.state >= 0
    cache = engine.scheduler.prefixes.cache
    cache.evict_all()
    engine.scheduler.finish(request.id, "abort")
    engine.scheduler.check()
    assert cache.tree.checkpoints == 0
    assert run(engine, prompt_of(30)).reuse.cached == 0
    engine.check_empty()


def test_no_store_reads_and_leaves_nothing() -> None:
    engine = engine_of()
    run(engine, prompt_of(12))
    stored = engine.scheduler.prefixes.cache.tree.checkpoints
    assert run(engine, prompt_of(12), store=False).reuse.cached == 11
    assert run(engine, prompt_of(20, seed=5), store=False).reuse.cached == 0
    assert engine.scheduler.prefixes.cache.tree.checkpoints == stored
    assert run(engine, prompt_of(20, seed=5)).reuse.cached == 0


def test_salts_are_apart() -> None:
    engine = engine_of()
    run(engine, prompt_of(12), namespace=Namespace("a"))
    assert run(engine, prompt_of(12), namespace=Namespace("b")).reuse.cached == 0
    assert run(engine, prompt_of(12), namespace=Namespace("a")).reuse.cached == 11


def test_marks_are_saved() -> None:
    engine = engine_of()
    run(engine, prompt_of(20), marks=[7])
    assert run(engine, [*prompt_of(20)[:7], 1, 2, 3]).reuse.cached == 7


def test_scored_prompts_are_computed_whole() -> None:
    engine = engine_of()
    run(engine, prompt_of(12))
    assert run(engine, prompt_of(12), prompt_logprobs=0).reuse.cached == 0


def test_a_family_begins_from_the_cache() -> None:
    engine = engine_of()
    run(engine, prompt_of(12))
    family = Family()
    members = [engine.add(prompt_of(12), 4, i, family=family) for i in range(4)]
    engine.drain()
    engine.check_exact()
    assert all(member.reuse.cached in (0, 11) for member in members)
    assert members[0].reuse.cached == 11
    engine.check_empty()


@pytest.mark.parametrize("policy", ["none", "align", "all", "ends", "auto"])
def test_the_smallest_arena_serves_everybody(policy: str) -> None:
    """ME-07, ME-14: an arena of one request; checkpoints are skipped, nothing fails."""
    layout = make_layout(5, 1)
    engine = engine_of(policy=policy, layout=layout, num_slabs=layout.slabs_for(layout.need(30)))
    for seed in range(4):
        for length in (20, 24, 20):
            engine.add(prompt_of(length, seed % 2), 5)
        engine.drain()
    engine.check_exact()
    assert all(request.finish_reason == "length" for request in engine.requests.values())
    engine.check_empty()


def test_memory_comes_back() -> None:
    """ME-09, ME-10: whatever fails to be scheduled holds nothing; the cache is all that holds."""
    engine = engine_of(num_slabs=12)
    for round_ in range(3):
        for seed in range(12):
            engine.add([*prompt_of(12, seed % 4), round_], 8)
        engine.drain()
        cached = engine.scheduler.prefixes.cache.only_cached()
        stats = engine.arena.stats()
        assert stats["pages"]["used"] == cached[PAGE]
        assert stats["slots"]["used"] == cached[SLOT]
        assert stats["slabs"]["used"] == cached["slab"]
    engine.check_exact()
    engine.check_empty()


def chatter(seed: int, arrivals: int, **fixed: Any) -> tuple[ToyEngine, Counter[str]]:
    """Requests that go on from earlier ones, or leave them somewhere; families, priorities, aborts, moves of
    entries, steps that overlap and steps that fail, little memory."""
    rng = random.Random(seed)
    options: dict[str, Any] = {
        "num_slabs": rng.choice([4, 6, 8, 12, 30]),
        "swap_bytes": rng.choice([0, 4000, 10**9]),
        "recompute_below": rng.choice([0, 10, 1000]),
        "layout": make_layout(*rng.choice([(5, 1), (3, 2), (1, 4), (8, 1), (4, 0), (0, 2)])),
        "max_num_seqs": rng.randint(2, 12),
        "max_num_batched_tokens": rng.choice([3, 8, 30]),
        "chunk_size": rng.choice([1, 4, 8]),
        "policy": rng.choice(["auto", "auto", "ends", "all", "align"]),
        "order": rng.choice(["expected", "lru", "greedy dual"]),
        "saves_inside": rng.random() < 0.5,
        **fixed,
    }
    engine = ToyEngine(**options)
    longest = min(engine.longest_request(), 60)
    known: list[list[int]] = [prompt_of(longest // 3, seed)]
    names = [size.name for size in engine.arena.layout.classes]
    out = []
    while len(engine.requests) < arrivals or engine.scheduler.requests:
        for _ in range(rng.randint(0, 3) if len(engine.requests) < arrivals else 0):
            base = rng.choice(known[-8:])
            keep = rng.choice([len(base), len(base), rng.randint(0, len(base))])
            prompt = (base[:keep] + prompt_of(rng.randint(1, 6), rng.randrange(10**6)))[: longest - 2]
            family = Family() if rng.random() < 0.15 else None
            marks = [rng.randint(0, len(prompt))] if rng.random() < 0.3 else []
            space = Namespace(rng.choice([None, None, None, "salt"]))
            for i in range(3 if family else 1):
                priority = 0 if family else rng.choice([0, 0, 0, 1])
                tokens = rng.randint(1, min(25, longest - len(prompt)))
                engine.add(prompt, tokens, i, priority, family, namespace=space, marks=marks)
        for _ in range(rng.randint(1, 5)):
            if rng.random() < 0.15:
                engine.shake(rng.choice(names))
            plan = engine.begin()
            out += [plan] if plan is not None else []
            while len(out) > (plan is not None and rng.random() < 0.5):
                if rng.random() < 0.01:
                    engine.fail(out.pop(0))
                else:
                    engine.complete(out.pop(0))
        if rng.random() < 0.1 and engine.scheduler.requests:
            engine.scheduler.finish(rng.choice(list(engine.scheduler.requests)), "abort")
            engine.scheduler.check()
        known += [
            [t for t in r.tokens if t != UNKNOWN]
            for r in list(engine.requests.values())[-4:]
            if r.finish_reason == "length"
        ][:2]
    engine.check_exact()
    stats = engine.scheduler.prefixes.stats()
    happened = Counter({name: stats[name] for name in ("hit_tokens", "saved", "evicted", "refused")})
    for name, n in engine.scheduler.prefixes.tier_stats().get("host", {}).items():
        happened[f"host {name}"] = n
    happened["copies"] = sum(len(plan.page_copies) for plan in engine.plans)
    happened["inside"] = sum(len(span.saves) for plan in engine.plans for span in plan.spans)
    happened["moves"] = sum(len(plan.moves) for plan in engine.plans)
    happened.update(
        {
            name: n
            for name, n in engine.scheduler.stats().items()
            if name in ("preempted_swap", "preempted_recompute")
        }
    )
    engine.check_empty()
    return engine, happened


def test_everything_at_once() -> None:
    total: Counter[str] = Counter()
    for seed in range(16):
        total += chatter(seed, arrivals=60)[1]
    assert total["hit_tokens"] > 3000
    for name in (
        "inside",
        "saved",
        "evicted",
        "refused",
        "copies",
        "moves",
        "preempted_swap",
        "preempted_recompute",
    ):
        assert total[name] > 20, f"hardly any {name}: {total}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1060))
def test_everything_at_once_for_long(seed: int) -> None:
    chatter(seed, arrivals=300)


def test_a_request_s_tokens_do_not_depend_on_the_cache() -> None:
    """The same requests with and without one: the toy's tokens are what the request alone would draw."""
    engine = engine_of()
    prompt = prompt_of(12)
    for _ in range(3):
        assert output_of(run(engine, prompt)) == expected_tokens(prompt, 5, 0)
