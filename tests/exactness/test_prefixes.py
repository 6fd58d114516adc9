"""Requests that begin from checkpoints give the tokens of a cold run, at every kind of boundary and whatever
happened to the checkpoint meanwhile."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from denim.engine.cache_wishes import CacheWishes
from denim.engine.core import EngineCore
from denim.engine.outputs import RequestOutput
from denim.sampling_params import SamplingParams
from tests.exactness.conftest import Model
from tests.exactness.harness import COLD, Case, Way, greedy, make_core, run, tokens_of
from tests.tiny import VOCAB

WIDTH, PAGE, CHUNK = 4, 16, 64  # of the convolution, in tokens; of a page; of a chunk
SHARED = 4 * CHUNK
PARAMS = SamplingParams(temperature=0, max_tokens=12, logprobs=5, ignore_eos=True)


def core_of(model: Model, longest: int = 600, **options: Any) -> EngineCore:
    return make_core(model.folder, [greedy([0] * longest, 20)], Way(options))


def ask(
    core: EngineCore, prompt: list[int], params: SamplingParams = PARAMS, **options: Any
) -> RequestOutput:
    output = core.requests[core.add(prompt, params, **options)].output
    while core.has_work:
        core.step()
    return output


def judged(model: Model, output: RequestOutput) -> RequestOutput:
    answer = output.outputs[0]
    model.judge.greedy(output.prompt_token_ids, answer.token_ids)
    if answer.logprobs is not None:
        model.judge.logprobs(output.prompt_token_ids, answer.token_ids, answer.logprobs)
    return output


def leave(core: EngineCore, prompt: list[int]) -> None:
    """Leave a checkpoint after all of `prompt`: what a generation of one token applies."""
    ask(core, prompt, SamplingParams(temperature=0, max_tokens=1))


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize(
    "tail", [0, 1, 2, WIDTH - 1, WIDTH, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1]
)
def test_a_tail_of_any_length(models: dict[str, Model], kind: str, tail: int) -> None:
    """PH-02, PH-07: the hit is exact, so just the tail runs; of the prompt itself its last token."""
    model = models[kind]
    core = core_of(model)
    shared = tokens_of(SHARED, 0, VOCAB)
    leave(core, shared)
    before = core.tokens
    output = judged(model, ask(core, shared + tokens_of(tail, tail, VOCAB)))
    assert output.num_cached_tokens == SHARED - (tail == 0)
    assert core.tokens - before == max(1, tail) + PARAMS.max_tokens - 1


@pytest.mark.parametrize(
    "length", [1, WIDTH - 1, WIDTH, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK + 1, 5 * PAGE + 3]
)
@pytest.mark.parametrize("page_size", [1, 16, 32, 128])
def test_a_checkpoint_at_any_position(dense: Model, length: int, page_size: int) -> None:
    """PH-07: pages smaller and larger than what they are shared for; two branches behind one page."""
    core = core_of(dense, page_size=page_size)
    shared = tokens_of(length, 7, VOCAB)
    leave(core, shared)
    for seed in range(3):
        output = judged(dense, ask(core, shared + tokens_of(20, seed, VOCAB)))
        assert output.num_cached_tokens == length
    core.check()


@pytest.mark.parametrize("budget", [1, 2, 3, 4096])
def test_short_tails_do_not_touch_what_they_begin_from(dense: Model, budget: int) -> None:
    """PH-05: after each of them the same probe gives the same tokens."""
    core = core_of(dense, max_num_batched_tokens=budget)
    shared = tokens_of(SHARED, 0, VOCAB)
    leave(core, shared)
    probe = shared + tokens_of(30, 99, VOCAB)
    first = judged(dense, ask(core, probe)).outputs[0]
    for tail in (1, 2, 3, 4):
        judged(dense, ask(core, shared + tokens_of(tail, tail, VOCAB)))
        again = judged(dense, ask(core, probe)).outputs[0]
        assert again.token_ids == first.token_ids


@pytest.mark.parametrize("seed", range(5))
def test_siblings_of_a_prefix_that_nobody_has_computed(dense: Model, seed: int) -> None:
    """PH-03: all at once, in any order; and once more when it is known."""
    core = core_of(dense, max_num_batched_tokens=100)
    shared = tokens_of(SHARED, seed, VOCAB)
    prompts = [shared + tokens_of(20, 100 + i, VOCAB) for i in range(8)]
    random.Random(seed).shuffle(prompts)
    for expected in ([0] + [SHARED] * 7, None):
        outputs = [core.requests[core.add(prompt, PARAMS)].output for prompt in prompts]
        while core.has_work:
            core.step()
        cached = [judged(dense, output).num_cached_tokens for output in outputs]
        assert cached == expected or (expected is None and min(cached) >= SHARED)


def test_a_hit_while_its_owner_runs_on(dense: Model) -> None:
    core = core_of(dense)
    prompt = tokens_of(200, 0, VOCAB)
    owner = core.requests[core.add(prompt, SamplingParams(temperature=0, max_tokens=60))].output
    for _ in range(20):
        core.step()
    hit = core.requests[core.add([*prompt[:199], 5, 6, 7], PARAMS)].output
    while core.has_work:
        core.step()
    assert judged(dense, hit).num_cached_tokens == 199
    judged(dense, owner)


def test_evicted_and_back_again(dense: Model) -> None:
    core = core_of(dense)
    prompt = tokens_of(130, 0, VOCAB)
    for cached in (0, 129):
        assert judged(dense, ask(core, prompt)).num_cached_tokens == cached
    cache = core.scheduler.prefixes.cache
    cache.evict_all()
    for cached in (0, 129):
        assert judged(dense, ask(core, prompt)).num_cached_tokens == cached


@pytest.mark.parametrize("swap", [True, False], ids=["swapped", "recomputed"])
@pytest.mark.parametrize("steps", [1, 2, 6])
def test_preempted_after_a_hit(dense: Model, swap: bool, steps: int) -> None:
    """At once, while its state still lies in the checkpoint, or later; with the checkpoint there or gone."""
    for evict in (False, True):
        way = Way(swap=swap).with_options(max_num_seqs=1, swap_space="1GiB" if swap else 0)
        core = make_core(dense.folder, [greedy([0] * 300, 40)], way)
        prompt = tokens_of(130, 0, VOCAB)
        leave(core, prompt)
        output = core.requests[core.add(prompt + tokens_of(70, 1, VOCAB), PARAMS)].output
        for _ in range(steps):
            core.step()
        core.add([1, 2], SamplingParams(max_tokens=2), priority=-1)
        core.step()
        cache = core.scheduler.prefixes.cache
        if evict:
            cache.evict_all()
        while core.has_work:
            core.step()
        stats = core.stats()
        assert stats["preempted_swap" if swap else "preempted_recompute"] == 1
        assert judged(dense, output).num_cached_tokens == 130


@pytest.mark.parametrize("steps", range(1, 8))
def test_aborted_while_it_saves(dense: Model, steps: int) -> None:
    """Whatever it left is right, and nothing is lost."""
    core = core_of(dense, max_num_batched_tokens=64)
    prompt = tokens_of(300, 0, VOCAB)
    id_ = core.add(prompt, PARAMS, cache=CacheWishes(cache_control=(70, 130, 200)))
    for _ in range(steps):
        core.step()
    core.abort(id_)
    core.check()
    judged(dense, ask(core, prompt))
    judged(dense, ask(core, prompt[:250]))
    assert core.stats()["slots"]["used"] == 0


@pytest.mark.parametrize("answer_tokens", range(1, 9))
def test_a_donated_state_with_recorded_updates(dense: Model, answer_tokens: int) -> None:
    """With deferred writes the last updates may only be recorded; who begins there has them written first."""
    core = core_of(dense, deferred_writes=4)
    prompt = tokens_of(100, 0, VOCAB)
    answer = ask(core, prompt, SamplingParams(temperature=0, max_tokens=answer_tokens, ignore_eos=True))
    history = [*prompt, *answer.outputs[0].token_ids]
    following = [history + tokens_of(10, seed, VOCAB) for seed in range(3)]
    outputs = [core.requests[core.add(tokens, PARAMS)].output for tokens in following]
    while core.has_work:
        core.step()
    for output in outputs:
        assert judged(dense, output).num_cached_tokens == len(history) - 1


def test_answers_are_reused_and_continued(dense: Model) -> None:
    """DS-04: the same prompt again does not go on behind the old answer; half of it given is continued."""
    core = core_of(dense)
    prompt = tokens_of(100, 0, VOCAB)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    answer = judged(dense, ask(core, prompt, params)).outputs[0].token_ids
    assert judged(dense, ask(core, prompt, params)).outputs[0].token_ids == answer
    half = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    rest = ask(core, prompt + answer[:30], half)
    assert rest.num_cached_tokens >= 99 and rest.outputs[0].token_ids == answer[30:]


def test_recycled_memory_under_a_cache(dense: Model) -> None:
    """DS-01, DS-09: short prompts in slots and pages that checkpoints have left."""
    core = core_of(dense)
    for seed in range(6):
        ask(core, tokens_of(200, seed, VOCAB))
    core.reset_prefix_cache()
    for length in (1, 2, 3, WIDTH - 1, WIDTH, PAGE - 1):
        judged(dense, ask(core, tokens_of(length, 50 + length, VOCAB)))


def test_random_draws_do_not_depend_on_hits(dense: Model) -> None:
    prompt = tokens_of(150, 3, VOCAB)
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=20, repetition_penalty=1.2)
    (cold,) = run(dense.folder, [Case(prompt, params)], COLD).outputs
    core = core_of(dense)
    for cached in (0, 149, 149):
        output = ask(core, prompt, params)
        assert output.num_cached_tokens == cached
        assert output.outputs[0].token_ids == cold.outputs[0].token_ids


def test_records_of_a_checkpoint_are_written_once(dense: Model) -> None:
    """A generation ends with recorded updates in its slot; who begins from it writes them into the state, and
    whoever comes next finds them written."""
    core = core_of(dense, deferred_writes=6)
    prompt = tokens_of(70, 0, VOCAB)
    history = [*prompt, *ask(core, prompt).outputs[0].token_ids]
    (node,) = [n for n in core.scheduler.prefixes.cache.tree.nodes() if n.checkpoint and n.end > len(prompt)]
    assert core.arena.tag(node.checkpoint.slot).pending > 1
    for seed in range(3):
        output = judged(dense, ask(core, history + tokens_of(1 + seed, seed, VOCAB)))
        assert output.num_cached_tokens == len(history) - 1


def move_all(core: EngineCore, name: str) -> None:
    """The entries of a class, or the last of them if fewer are free, take free ones' places, as when
    scattered memory is joined."""
    arena, compactor = core.arena, core.scheduler._holdings.compactor
    held = [entry for slab in arena.free_in_open(name) for entry in arena.held_in(slab)]
    free = [entry for slab in arena.free_in_open(name) for entry in arena.free_in(slab)]
    count = min(len(held), len(free))
    assert count
    compactor._move(name, held[-count:], free[:count])


def move_all_in_the_middle_of_steps(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, between a step's admissions and the dealing of its spans, where room is made for what is
    reserved."""
    prefixes = core.scheduler.prefixes
    reserve = prefixes.reserve

    def crowded(*given: Any) -> None:
        for name in ("slot", "page"):
            move_all(core, name)
        reserve(*given)

    monkeypatch.setattr(prefixes, "reserve", crowded)


def test_what_is_kept_for_a_checkpoint_to_come_moves(dense: Model) -> None:
    """Its slot is taken when it is within reach, and another prompt takes the step's tokens first."""
    core = core_of(dense, max_num_batched_tokens=CHUNK)
    prompts = [tokens_of(2 * CHUNK - 4, 1, VOCAB), tokens_of(50, 2, VOCAB)]
    first = core.requests[core.add(prompts[0], PARAMS)].output
    second = core.requests[core.add(prompts[1], PARAMS, cache=CacheWishes(cache_control=[40]))].output
    request = core.scheduler.requests[max(core.scheduler.requests)]
    while request.slot < 0:
        core.step()
    assert request.reuse.reserved and request.computed < 40
    for name in ("slot", "page"):
        move_all(core, name)
    while core.has_work:
        core.step()
        core.check()
    for output in (first, second):
        judged(dense, output)
    again = judged(dense, ask(core, prompts[1][:40] + tokens_of(9, 3, VOCAB)))
    assert again.num_cached_tokens == 40


def test_a_page_moves_in_the_step_that_copies_it(dense: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request begins inside a page, and room for others is made behind it in the same step."""
    core = core_of(dense)
    shared = tokens_of(PAGE + 5, 0, VOCAB)
    leave(core, shared)
    move_all_in_the_middle_of_steps(core, monkeypatch)
    output = core.requests[core.add(shared + tokens_of(7, 1, VOCAB), PARAMS)].output
    core.step()
    monkeypatch.undo()
    core.check()
    while core.has_work:
        core.step()
    assert judged(dense, output).num_cached_tokens == len(shared)
    assert judged(dense, ask(core, shared + tokens_of(7, 2, VOCAB))).num_cached_tokens == len(shared)


def test_everything_moves_in_the_middle_of_every_step(dense: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a hit, behind a leader of several completions, and on the way back from host memory."""
    way = Way({"max_num_seqs": 4, "swap_space": "1GiB"}, swap=True)
    core = make_core(dense.folder, [greedy([0] * 300, 20)], way)
    shared = tokens_of(PAGE + 5, 0, VOCAB)
    leave(core, shared)
    move_all_in_the_middle_of_steps(core, monkeypatch)
    params = replace(PARAMS, n=3)
    outputs = [
        core.requests[core.add(prompt, params)].output
        for prompt in (shared + tokens_of(7, 1, VOCAB), tokens_of(CHUNK, 2, VOCAB))
    ]
    for _ in range(6):
        core.step()
    for _ in range(4):
        core.add([1, 2], SamplingParams(max_tokens=2), priority=-1)
    while core.has_work:
        core.step()
        core.check()
    assert core.stats()["preempted_swap"] == 4
    assert [output.num_cached_tokens for output in outputs] == [len(shared), 0]
    for output in outputs:
        for answer in output.outputs:
            dense.judge.greedy(output.prompt_token_ids, answer.token_ids)
            assert len(answer.token_ids) == PARAMS.max_tokens
