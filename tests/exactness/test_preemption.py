"""Requests that give way, wherever that happens, go on as if nothing had been."""

from __future__ import annotations

from dataclasses import replace

import pytest

from denim import LLM
from denim.engine.core import EngineCore
from denim.engine.outputs import RequestOutput
from denim.sampling_params import SamplingParams
from tests.exactness.conftest import Model
from tests.exactness.harness import Case, Way, greedy, make_core, run, tokens_of
from tests.exactness.judge import agree_up_to_a_tie, judge_run
from tests.tiny import VOCAB

BOTH_WAYS = pytest.mark.parametrize("swap", [True, False], ids=["swapped", "recomputed"])


def displaced(core: EngineCore, cases: list[Case], marks: set[int]) -> tuple[list[RequestOutput], list[int]]:
    """Run `cases` at once; urgent requests take all their seats whenever the first of them has as many tokens
    as a mark says. Returns outputs and the number of preemptions of each."""
    ids = [core.add(*case) for case in cases]
    outputs = [core.requests[id_].output for id_ in ids]
    records = [core.scheduler.requests[i] for id_ in ids for i in core.requests[id_].completions]
    marks = set(marks)
    while core.has_work:
        core.step()
        if len(outputs[0].outputs[0].token_ids) in marks:
            marks.remove(len(outputs[0].outputs[0].token_ids))
            for _ in cases:
                core.add([1, 2], SamplingParams(max_tokens=2), priority=-1)
    assert not marks
    return outputs, [record.preemptions for record in records]


def seats(n: int, swap: bool, **options: object) -> Way:
    return Way(options={"max_num_seqs": n, "swap_space": "1GiB" if swap else 0, **options}, swap=swap)


@BOTH_WAYS
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_small_pool(models: dict[str, Model], kind: str, swap: bool) -> None:
    """PR-01: four requests in memory for a few of their pages; the arena alone makes them give way."""
    model = models[kind]
    cases = [greedy(tokens_of(60, seed, VOCAB), 180) for seed in range(4)]
    way = Way(slabs=0, swap=swap).with_options(swap_space="1GiB" if swap else 0)
    outcome = run(model.folder, cases, way)
    judge_run(model.judge, cases, outcome)
    assert outcome.stats["preempted_swap" if swap else "preempted_recompute"] >= 3
    assert outcome.preemptions[0] == 0  # the first in the order never gives way


@BOTH_WAYS
def test_at_any_moment(dense: Model, swap: bool) -> None:
    """PR-05: after 1, 8, 31, 127 and 255 tokens behind a prompt of eight chunks and one token."""
    cases = [greedy(tokens_of(513, 1, VOCAB), 260, logprobs=1)]
    marks = {1, 8, 31, 127, 255}
    core = make_core(dense.folder, cases, seats(1, swap))
    outputs, preemptions = displaced(core, cases, marks)
    assert preemptions == [len(marks)]
    completion = outputs[0].outputs[0]
    dense.judge.greedy(cases[0].prompt, completion.token_ids)
    dense.judge.logprobs(cases[0].prompt, completion.token_ids, completion.logprobs)


@BOTH_WAYS
def test_at_any_moment_in_bf16(dense: Model, swap: bool) -> None:
    """PR-05: the first difference stands at a near tie of the cold run."""
    cases = [greedy(tokens_of(100, seed, VOCAB), 60, logprobs=2) for seed in range(3)]
    options = {"dtype": "bfloat16"}
    cold = run(dense.folder, cases, Way(options=options, company="alone"))
    outputs, preemptions = displaced(
        make_core(dense.folder, cases, seats(3, swap, **options)), cases, {1, 8, 31}
    )
    assert preemptions == [3, 3, 3]
    for reference, output in zip(cold.outputs, outputs, strict=True):
        agree_up_to_a_tie(reference.outputs[0], output.outputs[0].token_ids)


def test_generated_tokens_are_prefilled_again_in_segments(dense: Model) -> None:
    """PR-06: 500 tokens are computed again under a budget of 128; nothing is repeated or lost at the seam."""
    cases = [greedy(tokens_of(200, seed, VOCAB), 320, prompt_logprobs=0, logprobs=0) for seed in (1, 2)]
    core = make_core(dense.folder, cases, seats(2, swap=False, max_num_batched_tokens=128))
    outputs, preemptions = displaced(core, cases, {300})
    assert preemptions == [1, 1]
    assert core.stats()["preempted_recompute"] == 2
    for case, output in zip(cases, outputs, strict=True):
        completion = output.outputs[0]
        assert len(completion.token_ids) == 320
        dense.judge.greedy(case.prompt, completion.token_ids)
        dense.judge.logprobs(case.prompt, completion.token_ids, completion.logprobs)
        dense.judge.prompt_logprobs(case.prompt, output.prompt_logprobs)


@BOTH_WAYS
def test_all_resume_in_one_step(dense: Model, swap: bool) -> None:
    """PR-07: a step of nothing but resumed requests."""
    cases = [greedy(tokens_of(n, 4, VOCAB), 30) for n in (40, 41)]
    core = make_core(dense.folder, cases, seats(2, swap))
    outputs, preemptions = displaced(core, cases, {1, 11})
    assert preemptions == [2, 2]
    for case, output in zip(cases, outputs, strict=True):
        dense.judge.greedy(case.prompt, output.outputs[0].token_ids)


def test_forked_requests_give_way(dense: Model) -> None:
    """Pages shared by completions of one request come back, moved or computed again."""
    cases = [greedy(tokens_of(70, 8, VOCAB), 40, n=3)]
    for swap in (True, False):
        core = make_core(dense.folder, cases, seats(3, swap))
        ids = core.add(*cases[0])
        output = core.requests[ids].output
        for mark in (2, 20):
            while len(output.outputs[0].token_ids) < mark:
                core.step()
            for _ in range(3):
                core.add([1, 2], SamplingParams(max_tokens=2), priority=-1)
        while core.has_work:
            core.step()
        assert core.stats()["preempted_swap" if swap else "preempted_recompute"] == 6
        for completion in output.outputs:
            dense.judge.greedy(cases[0].prompt, completion.token_ids)


def test_a_cache_reset_takes_nothing_from_those_that_run(dense: Model) -> None:
    """PR-03: ten resets while four requests decode."""
    llm = LLM(dense.folder, memory="1MiB", max_model_len=256, debug=True)
    cases = [greedy(tokens_of(20 + 13 * seed, seed, VOCAB), 40) for seed in range(4)]
    ids = [llm.core.add(*case) for case in cases]
    outputs = [llm.core.requests[id_].output for id_ in ids]
    resets = 0
    while llm.core.has_work:
        llm.core.step()
        if resets < 10 and llm.core.steps % 3 == 0:
            assert llm.stats()["running"] == 4
            llm.reset_prefix_cache()
            llm.check()
            resets += 1
    assert resets == 10
    for case, output in zip(cases, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == 40
        dense.judge.greedy(case.prompt, output.outputs[0].token_ids)


def test_out_before_the_first_step_behind_a_hit(dense: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a step takes one prompt at most, a request may have a state to begin from, with recorded updates,
    and no turn yet. It gives way with that state, which others begin from as well."""
    way = seats(2, swap=True, deferred_writes=6, max_num_batched_tokens=128)
    core = make_core(dense.folder, [greedy(tokens_of(300, 0, VOCAB), 20)], way)
    config = replace(core.scheduler.config, max_prefill_spans=1)
    monkeypatch.setattr(core.scheduler, "config", config)
    history = tokens_of(70, 0, VOCAB)
    first = core.requests[core.add(*greedy(history, 12))].output
    while core.has_work:
        core.step()
    history += first.outputs[0].token_ids
    long, tail = greedy(tokens_of(120, 1, VOCAB), 4), greedy(history + tokens_of(5, 2, VOCAB), 12)
    outputs = [core.requests[core.add(*case)].output for case in (long, tail)]
    core.step()
    waiting = core.scheduler.requests[max(core.scheduler.requests)]
    assert waiting.computed == len(history) - 1
    assert core.arena.tag(waiting.state_slot).pending > 1
    core.add([1, 2], SamplingParams(max_tokens=2), priority=-1)
    core.step()
    assert core.stats()["swapped"] == 1
    other = greedy(history + tokens_of(4, 3, VOCAB), 12)
    outputs.append(core.requests[core.add(*other)].output)
    while core.has_work:
        core.step()
    assert [output.num_cached_tokens for output in outputs] == [0, len(history) - 1, len(history) - 1]
    for case, output in zip((long, tail, other), outputs, strict=True):
        dense.judge.greedy(case.prompt, output.outputs[0].token_ids)
