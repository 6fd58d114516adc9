from __future__ import annotations

import random
from itertools import combinations

import pytest

from denim.cache.spacing import BINS, MEASURED, PRIOR, OverlapDepths, place


def cost(weights: list[int], chosen: tuple[int, ...]) -> float:
    total = 0.0
    for b, weight in enumerate(weights):
        before = max((c for c in chosen if c <= b), default=0)
        total += (weight + PRIOR) * (b + 0.5 - before)
    return total


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_is_better(seed: int) -> None:
    chance = random.Random(seed)
    weights = [chance.choice([0, 0, 1, 5, 30]) for _ in range(9)]
    for count in (1, 2, 3):
        best = min(cost(weights, chosen) for chosen in combinations(range(1, 9), count))
        assert cost(weights, place(weights, count)) == pytest.approx(best)


def test_with_nothing_measured_the_spacing_is_even() -> None:
    assert place([0] * 48, 3) == (12, 24, 36)


def test_a_third_less_is_computed_again_than_with_even_spacing() -> None:
    """Depths that gather at a few places, as those of system prompts and documents do; 8 checkpoints."""
    chance = random.Random(0)
    centres = [4, 11, 13, 30, 44]
    weights = [0] * BINS
    for _ in range(400):
        weights[min(BINS - 1, max(0, round(chance.gauss(chance.choice(centres), 1.5))))] += 1
    even = tuple(round(BINS * (i + 1) / 9) for i in range(8))
    assert cost(weights, place(weights, 8)) < 2 / 3 * cost(weights, even)


def test_positions_follow_what_was_measured() -> None:
    depths = OverlapDepths(tokens_each=10_000)
    assert depths.spaced(0, 9_999) == []
    (position,) = depths.spaced(0, 19_999)
    assert 9_000 < position < 11_000
    for _ in range(50):
        depths.note(4_000)
    (position,) = depths.spaced(0, 19_999)
    assert 3_500 < position <= 4_000
    for _ in range(MEASURED):
        depths.note(15_000)
    (position,) = depths.spaced(0, 19_999)
    assert 14_500 < position <= 15_000


def test_spacing_can_be_off() -> None:
    assert OverlapDepths(0).spaced(0, 10**6) == []
