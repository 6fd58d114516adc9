"""How likely a checkpoint is to be used again, learned from the workload.

Owns one number for each class of checkpoints. The longer something has waited the less likely it is to be
used soon: a checkpoint of class c that has waited for a time a is used with the rate

    θ_c / (a + PAUSE)    per second,

and θ_c is estimated as uses / Σ ln((a + PAUSE) / PAUSE) over all waits of the class, whether they ended in a
use or not: the maximum-likelihood estimate of proportional hazards (Cox, 1972) with this baseline. Classes
with θ alike are ordered as by LRU; what is used often for its age outranks what is not. Knows nothing of
bytes or FLOPs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import NamedTuple

PAUSE = 10.0
"""Seconds within which age says nothing: nobody reads an answer and writes the next message faster."""

MOST_USES = 3
"""Uses beyond so many make no new class."""

PRIOR_WEIGHT = 3.0
"""Weight of the prior, in waits of e - 1 pauses."""

FORGET_AFTER = 4096.0
"""Summed waits of a class after which its counts are halved, so that the estimate follows the workload."""


class Class(NamedTuple):
    """Checkpoints that are expected to behave alike.

    kind: why it was saved; base: why the next one above it was (None: there is none), which tells a
    conversation's first turn from later ones, and a path that is edited from one that only grows.
    covered: a deeper one stands, or will soon, which serves all that goes on from there.
    """

    kind: str
    base: str | None
    covered: bool
    uses: int


@dataclass(eq=False, slots=True)
class Wait:
    """A checkpoint's wait for its next use. `counted`: the age up to which it is part of the counts."""

    klass: Class
    since: float
    counted: float = 0.0


@dataclass(slots=True)
class _Counts:
    uses: float
    waited: float


def prior(klass: Class) -> float:
    """θ before anything was seen. A covered checkpoint is used only by who leaves the path right there."""
    return 0.03 if klass.covered else 0.3


class ReuseRates:
    """Counts and rates by class. Times are in seconds of one clock."""

    def __init__(self) -> None:
        self._counts: dict[Class, _Counts] = {}

    def begin(self, kind: str, base: str | None, covered: bool, now: float) -> Wait:
        """A checkpoint that was never used begins to wait."""
        return Wait(Class(kind, base, covered, 0), now)

    def cover(self, wait: Wait, covered: bool, now: float) -> None:
        """From now on the wait belongs to the other class; its age goes on."""
        self.grow(wait, now)
        wait.klass = wait.klass._replace(covered=covered)

    def grow(self, wait: Wait, now: float) -> None:
        """Count that there was no use up to now."""
        age = now - wait.since
        if age > wait.counted:
            counts = self._of(wait.klass)
            counts.waited += log((age + PAUSE) / (wait.counted + PAUSE))
            wait.counted = age
            if counts.waited > FORGET_AFTER:
                counts.uses /= 2
                counts.waited /= 2

    def use(self, wait: Wait, now: float) -> Wait:
        """Count the use that ends a wait; returns the next wait, of something not covered."""
        self.grow(wait, now)
        self._of(wait.klass).uses += 1
        uses = min(wait.klass.uses + 1, MOST_USES)
        return Wait(wait.klass._replace(covered=False, uses=uses), now)

    def rate(self, wait: Wait, now: float) -> float:
        """Expected uses per second at this moment."""
        counts = self._of(wait.klass)
        return counts.uses / counts.waited / (now - wait.since + PAUSE)

    def _of(self, klass: Class) -> _Counts:
        counts = self._counts.get(klass)
        if counts is None:
            counts = self._counts[klass] = _Counts(PRIOR_WEIGHT * prior(klass), PRIOR_WEIGHT)
        return counts
