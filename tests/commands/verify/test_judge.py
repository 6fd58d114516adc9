"""The rule by which a hit is right or wrong."""

from __future__ import annotations

import pytest

from denim.commands.verify.judge import FP32_MEAN, LOW_TIE, Answer, Difference, Rule, compare


def answer(tokens: list[int], *reports: dict[int, float]) -> Answer:
    return Answer(tokens, reports, 0, True)


def test_equal_answers_differ_by_nothing() -> None:
    one = answer([1, 2], {1: -0.1, 5: -2.0}, {2: -0.3, 5: -1.0})
    assert compare(one, one) == Difference(2, None, 0.0, [0.0] * 4)


def test_nothing_is_compared_behind_the_first_token_that_differs() -> None:
    cold = answer([1, 2, 3], {1: -0.5}, {2: -0.50, 4: -0.53}, {3: -0.1})
    hit = answer([1, 4, 9], {1: -0.5}, {4: -0.52, 2: -0.54}, {9: -9.0})
    difference = compare(cold, hit)
    assert (difference.tokens, difference.place) == (2, 1)
    assert difference.gap == pytest.approx(0.03) and sorted(difference.deltas) == pytest.approx(
        [0, 0.01, 0.04]
    )


def test_the_gap_is_between_the_two_best_whatever_was_reported_first() -> None:
    """A token's own report comes first, also where others are likelier."""
    cold = answer([3], {3: -2.0, 1: -0.5, 2: -0.75})
    assert compare(cold, answer([1], {1: -0.5, 2: -0.75, 3: -2.0})).gap == 0.25


def test_a_token_that_is_not_reported_counts_as_far_as_is_certain() -> None:
    cold, hit = answer([1], {1: -0.1, 2: -3.0}), answer([1], {1: -0.1, 7: -4.5})
    assert compare(cold, hit).deltas == pytest.approx([0.0, 1.5])


def test_the_rules_of_the_dtypes() -> None:
    fp32, low, experts = Rule.of(True, True), Rule.of(False, False), Rule.of(False, True)
    assert fp32.mean == FP32_MEAN < low.mean and low.tie == LOW_TIE and experts.tie is None
    tied, apart, same = (
        Difference(1, place, gap, [0.0]) for place, gap in ((0, 9e-5), (0, 0.04), (None, 9.0))
    )
    assert not fp32.breaks(tied) and fp32.breaks(apart) and not low.breaks(apart) and not low.breaks(same)
    assert low.breaks(apart._replace(gap=0.06)) and not experts.breaks(apart._replace(gap=9.0))


def test_no_more_is_asked_of_a_hit_than_of_a_recompute() -> None:
    rule = Rule.of(False, False)
    own, others = Difference(2, None, 0.0, [0.02, 0.04]), Difference(2, 1, 0.1, [0.08, 0.12])
    assert rule.beside([own], [own]) == Rule(LOW_TIE, 0.06)
    assert rule.beside([own], [own, others]) == Rule(0.12, pytest.approx(0.13))
    quiet = Difference(2, None, 0.0, [0.0, 0.0])
    assert rule.beside([quiet], [quiet]) == rule
