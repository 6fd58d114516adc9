"""Batch mates that come, go and are aborted change nothing for the others."""

from __future__ import annotations

import random

import pytest

from tests.exactness.conftest import Model
from tests.exactness.harness import Way, greedy, make_core, run, tokens_of
from tests.exactness.judge import judge_run
from tests.tiny import VOCAB


def test_joining_and_leaving(dense: Model) -> None:
    """DS-06: two join at decode step 5, one leaves at 9 as another joins; then thirty random schedules."""
    for schedule in range(31):
        chance = random.Random(schedule)
        joins = [0, 5, 5, 9] if not schedule else sorted(chance.randrange(20) for _ in range(4))
        lengths = [9, 12, 12, 8] if not schedule else [chance.randrange(3, 16) for _ in range(4)]
        cases = [greedy(tokens_of(chance.randrange(1, 30), i, VOCAB), n) for i, n in enumerate(lengths)]
        core = make_core(dense.folder, cases, Way())
        outputs, step = [], 0
        while core.has_work or len(outputs) < len(cases):
            while len(outputs) < len(cases) and joins[len(outputs)] <= step:
                outputs.append(core.requests[core.add(*cases[len(outputs)])].output)
            core.step()
            step += 1
        for case, output in zip(cases, outputs, strict=True):
            dense.judge.greedy(case.prompt, output.outputs[0].token_ids)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_among_random_mates(models: dict[str, Model], kind: str) -> None:
    """Mates of any length are aborted at any step, in prefill and decode."""
    model = models[kind]
    cases = [greedy(tokens_of(n, 3, VOCAB), 24, logprobs=0) for n in (1, 5, 40, 90)]
    for seed in range(3):
        way = Way(company="joining", recycled=True, shuffled=True, seed=seed)
        judge_run(model.judge, cases, run(model.folder, cases, way.with_options(max_num_batched_tokens=50)))


def test_unequal_lengths_in_one_batch(dense: Model) -> None:
    """PA-01, PA-04: short rows are not run over padding, in prefill, in a last segment, or later."""
    for lengths, budget in (((5, 50), 2048), ((10, 61, 150), 51), ((3, 4, 40), 2048)):
        cases = [greedy(tokens_of(n, 2, VOCAB), 20, logprobs=2, prompt_logprobs=0) for n in lengths]
        for chunk_size in (64, 1):
            way = Way(options={"max_num_batched_tokens": budget, "chunk_size": chunk_size})
            judge_run(dense.judge, cases, run(dense.folder, cases, way))


def test_every_length_up_to_a_chunk(dense: Model) -> None:
    """PA-02, PA-03: one row of every length, alone and with all the others."""
    cases = [greedy(tokens_of(n, 1, VOCAB), 3, logprobs=0) for n in range(1, 65)]
    for company in ("alone", "together"):
        judge_run(dense.judge, cases, run(dense.folder, cases, Way(company=company)))


def test_prompts_that_start_in_one_step(dense: Model) -> None:
    """PA-07: two to eight at once, one of which wants log-probabilities."""
    for count in range(2, 9):
        cases = [
            greedy(tokens_of(3 + 7 * i, i, VOCAB), 4, logprobs=1 if i == 1 else None) for i in range(count)
        ]
        judge_run(dense.judge, cases, run(dense.folder, cases, Way()))
