"""Prompts in segments of every length, and long greedy texts: tokens are those of transformers."""

from __future__ import annotations

from statistics import mean

import pytest
import torch

from denim import LLM, ConfigError
from tests.exactness.conftest import Model
from tests.exactness.harness import Way, greedy, run, tokens_of
from tests.exactness.judge import judge_run
from tests.tiny import VOCAB

CHUNK = 64
LENGTHS = range(1, 2 * CHUNK + 3)
# Around the convolution's width, the page, three pages, the chunk and two chunks.
EDGES = (1, 2, 3, 4, 5, 15, 16, 17, 47, 48, 49, 63, 64, 65, 127, 128, 129, 130)
PROMPTS = [greedy(tokens_of(130, 5, VOCAB), 3), greedy(tokens_of(7, 5, VOCAB), 3)]


def sweep(model: Model, lengths: object, chunk_size: int) -> None:
    for length in lengths:
        way = Way(options={"max_num_batched_tokens": length, "chunk_size": chunk_size})
        judge_run(model.judge, PROMPTS, run(model.folder, PROMPTS, way))


def test_segments_of_every_length(dense: Model) -> None:
    """Segments end on the chunk grid where they can."""
    sweep(dense, LENGTHS, CHUNK)


@pytest.mark.parametrize("kind", ["dense", "moe", "tied"])
def test_segments_that_end_anywhere(models: dict[str, Model], kind: str) -> None:
    """With chunks of one token every position is on the grid."""
    sweep(models[kind], EDGES, chunk_size=1)


@pytest.mark.slow
def test_segments_of_every_length_that_end_anywhere(dense: Model) -> None:
    sweep(dense, LENGTHS, chunk_size=1)


@pytest.mark.parametrize("chunk_size", [48, 64, 96, 100, 128])
def test_chunks_of_any_size(dense: Model, chunk_size: int) -> None:
    """BS-04: no size is special; three chunks and a bit, at once and in segments on and off its grid."""
    cases = [greedy(tokens_of(3 * chunk_size + 5, 2, VOCAB), 8, logprobs=0, prompt_logprobs=0)]
    for budget in (2048, 2 * chunk_size, chunk_size, chunk_size - 1, 33):
        way = Way(options={"chunk_size": chunk_size, "max_num_batched_tokens": budget})
        judge_run(dense.judge, cases, run(dense.folder, cases, way))


def test_a_chunk_beyond_the_limit_is_refused(dense: Model) -> None:
    """BS-04."""
    with pytest.raises(ConfigError, match="chunk_size=528 is too large; at most 512"):
        LLM(dense.folder, chunk_size=528)


@pytest.mark.parametrize("kind", ["dense", "moe", "tied"])
def test_200_tokens_as_transformers(models: dict[str, Model], kind: str) -> None:
    """The whole prompt at once, in three ragged segments, and token by token."""
    model = models[kind]
    prompt = tokens_of(150, 9, VOCAB)
    cases = [greedy(prompt, 200)]
    inputs = torch.tensor([prompt])
    with torch.no_grad():
        written = model.judge.reference.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=200, do_sample=False
        )
    model.judge.greedy(prompt, written[0, len(prompt) :].tolist())  # the reference agrees with itself
    for options in ({}, {"max_num_batched_tokens": 67, "chunk_size": 1}, {"max_num_batched_tokens": 1}):
        outcome = run(model.folder, cases, Way(options=options))
        judge_run(model.judge, cases, outcome)
        assert outcome.outputs[0].outputs[0].token_ids == written[0, len(prompt) :].tolist()
    assert outcome.stats["steps"] == 150 + 200 - 1


def test_no_drift_at_the_edges_of_segments(dense: Model) -> None:
    """CP-03: differences to the one-shot run stay at rounding level, behind an edge as before it."""
    prompt = tokens_of(600, 3, VOCAB)
    cases = [greedy(prompt, 1, prompt_logprobs=0)]

    def logprobs(budget: int) -> list[float]:
        outcome = run(dense.folder, cases, Way(options={"max_num_batched_tokens": budget}))
        judge_run(dense.judge, cases, outcome)
        return [next(iter(report.values())).logprob for report in outcome.outputs[0].prompt_logprobs[1:]]

    whole = logprobs(600)
    rounding = 1e-6
    for budget in (256, 250, 128, 64, 63):
        differences = [abs(a - b) for a, b in zip(whole, logprobs(budget), strict=True)]
        edge = budget // CHUNK * CHUNK or budget
        before, after = mean(differences[:edge]), mean(differences[edge:])
        assert after <= 5 * max(before, rounding), budget


def test_copies_of_one_prompt_in_one_batch(dense: Model) -> None:
    """CP-09: every copy is cut elsewhere, and all give the same text."""
    cases = [greedy(tokens_of(130, 6, VOCAB), 60)] * 8
    for chunk_size in (CHUNK, 1):
        way = Way(options={"max_num_batched_tokens": 100, "chunk_size": chunk_size})
        outcome = run(dense.folder, cases, way)
        judge_run(dense.judge, cases, outcome)
        assert len({tuple(output.outputs[0].token_ids) for output in outcome.outputs}) == 1
