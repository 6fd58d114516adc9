"""The matrix of design section 9: the same tokens, however a request was run."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from denim.sampling_params import SamplingParams
from tests.exactness.conftest import Model
from tests.exactness.harness import AXES, Case, Crossing, Run, cold_tokens, crossings, greedy, run, tokens_of
from tests.exactness.judge import judge_run
from tests.tiny import VOCAB

# Lengths around the convolution's width, the page and the chunk. Some are drawn at random with all that
# sampling can ask, some report log-probabilities.
CASES = [
    greedy(tokens_of(1, 0, VOCAB), 20),
    greedy(tokens_of(3, 0, VOCAB), 9, logprobs=2),
    greedy(tokens_of(16, 0, VOCAB), 20),
    greedy(tokens_of(64, 0, VOCAB), 18, prompt_logprobs=1),
    greedy(tokens_of(65, 0, VOCAB), 7, logprobs=0),
    greedy(tokens_of(130, 0, VOCAB), 12, prompt_logprobs=0),
    Case(tokens_of(4, 1, VOCAB), SamplingParams(temperature=1.0, seed=7, max_tokens=16, logprobs=1)),
    Case(
        tokens_of(33, 1, VOCAB),
        SamplingParams(
            temperature=0.8,
            top_p=0.9,
            top_k=50,
            repetition_penalty=1.3,
            frequency_penalty=0.5,
            seed=8,
            max_tokens=20,
        ),
    ),
]
ROWS = crossings()
PLAIN = {axis: next(iter(values)) for axis, values in AXES.items()}


def label(row: Crossing) -> str:
    odd = [
        f"{axis}={value}"
        for (axis, plain), value in zip(PLAIN.items(), row.names, strict=True)
        if value != plain
    ]
    return ",".join(odd).replace(" ", "_")


@pytest.fixture(scope="module")
def cold(models: dict[str, Model]) -> dict[str, dict]:
    return {name: cold_tokens(model.folder, CASES) for name, model in models.items()}


@pytest.mark.parametrize(
    ("number", "row"), list(enumerate(ROWS)), ids=[f"{i}-{label(row)}" for i, row in enumerate(ROWS)]
)
def test_every_pair_of_ways(
    models: dict[str, Model], cold: dict[str, dict], number: int, row: Crossing
) -> None:
    """One-shot or in segments, alone or among others, preempted or not, on fresh or recycled memory, forked
    or not, for every page and chunk size, crossed in pairs. The models take turns."""
    name = list(models)[number % len(models)]
    outcome = run(models[name].folder, CASES, row.way)
    judge_run(models[name].judge, CASES, outcome, cold[name])
    assert_preempted(row, outcome)
    assert_hit(row, outcome)
    assert_loaded(row, outcome)


def assert_preempted(row: Crossing, outcome: Run) -> None:
    """The ways that preempt really do, and as they are named."""
    if row.way.bump:
        counts = {
            "swapped": outcome.stats["preempted_swap"],
            "recomputed": outcome.stats["preempted_recompute"],
        }
        named = dict(zip(AXES, row.names, strict=True))["preempted"]
        assert counts.pop(named) > 0
        assert list(counts.values()) == [0]
        assert sum(outcome.preemptions) > 0


def assert_hit(row: Crossing, outcome: Run) -> None:
    """Where memory is roomy a request that has run before hits at one token before its prompt's end. What is
    pushed to lower tiers in every step may go there again before the request that it came up for begins.
    """
    named = dict(zip(AXES, row.names, strict=True))
    hits = outcome.stats["prefix"]["hit_tokens"]
    if named["prefixes"] == "none":
        assert hits == 0
    elif named["prefixes"] == "ends" and named["memory"] == "roomy":
        assert hits > 0 or named["tiers"] != "none"
        if named["preempted"] == "never" and named["company"] == "alone":
            scored = [case.params.prompt_logprobs is not None for case in CASES]
            cached = [output.num_cached_tokens for output in outcome.outputs]
            assert cached == [
                0 if skip else len(case.prompt) - 1 for case, skip in zip(CASES, scored, strict=True)
            ]


def assert_loaded(row: Crossing, outcome: Run) -> None:
    """Where requests run twice, what the first time left is used from the tier that it was pushed to."""
    named = dict(zip(AXES, row.names, strict=True))
    if named["tiers"] != "none" and named["prefixes"] == "ends" and named["memory"] != "tight":
        tiers = outcome.stats["tiers"]
        assert tiers["host"]["loaded"] > 0
        assert "disk" not in tiers or tiers["disk"]["loaded"] > 0


def test_the_design_has_every_pair() -> None:
    axes = list(AXES)
    for a, b in combinations(range(len(axes)), 2):
        met = {(row.names[a], row.names[b]) for row in ROWS}
        assert met == set(product(AXES[axes[a]], AXES[axes[b]])), (axes[a], axes[b])
