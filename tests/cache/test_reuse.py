from __future__ import annotations

import random
from math import exp, log

import pytest

from denim.cache.reuse import FORGET_AFTER, MOST_USES, PAUSE, Class, ReuseRates, prior


def test_the_rate_falls_with_age() -> None:
    rates = ReuseRates()
    wait = rates.begin("mark", None, False, now=100.0)
    assert rates.rate(wait, 100.0) == pytest.approx(prior(wait.klass) / PAUSE)
    assert rates.rate(wait, 100.0 + PAUSE) == pytest.approx(prior(wait.klass) / (2 * PAUSE))


def test_the_estimate_finds_the_class_s_factor() -> None:
    """Waits drawn from the model itself: survival ((a + pause) / pause)^-θ, cut off where evicted."""
    chance = random.Random(1)
    rates = ReuseRates()
    for theta, kind in ((0.8, "mark"), (0.1, "junction")):
        for _ in range(1500):
            wait = rates.begin(kind, None, False, now=0.0)
            age = PAUSE * (exp(min(60.0, -log(chance.random()) / theta)) - 1)
            cut = chance.choice([50.0, 1e4])
            if age < cut:
                rates.use(wait, age)
            else:
                rates.grow(wait, cut)
        fresh = rates.begin(kind, None, False, now=0.0)
        assert rates.rate(fresh, 0.0) * PAUSE == pytest.approx(theta, rel=0.12)


def test_classes_are_kept_apart() -> None:
    rates = ReuseRates()
    for i in range(200):
        rates.use(rates.begin("mark", None, False, now=i), now=i + 1.0)
        rates.grow(rates.begin("mark", None, True, now=i), now=i + 1000.0)
    used, idle, other = (
        rates.rate(rates.begin(*klass, now=0.0), 0.0)
        for klass in (("mark", None, False), ("mark", None, True), ("mark", "mark", False))
    )
    assert used > 10 * other > 10 * idle


def test_a_wait_goes_on_in_another_class() -> None:
    rates = ReuseRates()
    wait = rates.begin("mark", None, False, now=0.0)
    rates.cover(wait, True, now=50.0)
    assert wait.klass == Class("mark", None, True, 0) and wait.since == 0.0 and wait.counted == 50.0
    assert rates.rate(wait, 50.0) == pytest.approx(prior(wait.klass) / (50 + PAUSE))


def test_uses_are_counted_up_to_a_limit() -> None:
    rates = ReuseRates()
    wait = rates.begin("mark", None, True, now=0.0)
    for i in range(MOST_USES + 2):
        wait = rates.use(wait, float(i))
    assert wait.klass == Class("mark", None, False, MOST_USES)


def test_old_counts_fade() -> None:
    rates = ReuseRates()
    now = 0.0
    while rates._of(Class("mark", None, False, 0)).waited < FORGET_AFTER - 20:
        rates.grow(rates.begin("mark", None, False, now), now + 1e6)
    idle = rates.rate(rates.begin("mark", None, False, now), now)
    for _ in range(4000):
        rates.use(rates.begin("mark", None, False, now), now + 2 * PAUSE)
    assert rates.rate(rates.begin("mark", None, False, now), now) > 100 * idle
