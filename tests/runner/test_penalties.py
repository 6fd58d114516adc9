from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from denim.runner.penalties import SeenTokens, apply_penalties

VOCAB = 50
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=200)


def penalised(
    logit: float, in_prompt: bool, count: int, repetition: float, presence: float, frequency: float
) -> float:
    """The formula, for one token."""
    if in_prompt or count:
        logit = logit / repetition if logit > 0 else logit * repetition
    return logit - frequency * count - presence * (count > 0)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(st.tuples(tokens, tokens), min_size=1, max_size=3),
    repetition=st.sampled_from([1.0, 0.5, 1.3]),
    presence=st.sampled_from([0.0, -1.0, 2.0]),
    frequency=st.sampled_from([0.0, 0.25, -2.0]),
)
def test_logits_follow_the_formula(
    rows: list[tuple[list[int], list[int]]], repetition: float, presence: float, frequency: float
) -> None:
    logits = torch.randn(len(rows) + 1, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    before = logits.tolist()
    seen = []
    for prompt, output in rows:
        seen.append(SeenTokens(prompt))
        for token in output:
            seen[-1].append(token)
    places = list(range(len(rows), 0, -1))  # row 0 is not penalised
    size = len(rows)
    apply_penalties(logits, places, seen, [repetition] * size, [presence] * size, [frequency] * size)
    assert logits[0].tolist() == before[0]
    for place, (prompt, output) in zip(places, rows, strict=True):
        expected = [
            penalised(logit, token in prompt, output.count(token), repetition, presence, frequency)
            for token, logit in enumerate(before[place])
        ]
        assert logits[place].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_each_row_has_its_own_penalties() -> None:
    logits = torch.ones(2, 4)
    seen = [SeenTokens([0, 1]), SeenTokens([])]
    seen[1].append(3)
    apply_penalties(logits, [0, 1], seen, [2.0, 1.0], [0.0, 0.5], [0.0, 0.25])
    assert logits.tolist() == [[0.5, 0.5, 1.0, 1.0], [1.0, 1.0, 1.0, 0.25]]


def test_nothing_seen_changes_nothing() -> None:
    logits = torch.ones(1, 4)
    apply_penalties(logits, [0], [SeenTokens([])], [2.0], [1.0], [1.0])
    assert logits.tolist() == [[1.0] * 4]
