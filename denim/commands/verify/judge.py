"""When two runs of one request are the same, and how far apart they are.

Owns the comparison and the rule. The reference is this engine itself: the same prompt computed anew, alone
and in one piece. Knows answers; nothing of engines.

What "the same" can mean depends on the dtype. A hit cuts the prompt at another place than the recompute, so
sums are taken in another order. In fp32 that moves a log-probability by about 1e-6 nat and no token, but for
exact ties. In bf16 every rounding is 1/256 of a value, and two runs *without any cache* that are cut at
different places differ as well. So that is measured, on the same prompts (the control): a hit is wrong if it
is further from its recompute than two recomputes are from each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import NamedTuple

FP32_TIE = 1e-4
"""Nats between the recompute's two best tokens within which either may be drawn."""

LOW_TIE = 0.05
"""The same in bf16 and fp16."""

FP32_MEAN = 1e-4
"""Nats that log-probabilities may differ by on average, whatever the control says."""

LOW_MEAN = 0.01
"""The same in bf16 and fp16: logits around 8 are 1/16 apart there."""

ABOVE_CONTROL = 2.0
"""The mean of a few answers varies by less; one wrong state, window or page moves it much further."""


class Answer(NamedTuple):
    """`logprobs`: of each token and of the likeliest at its place, in nats. `cached`: tokens of the prompt
    that were not computed. `ended`: whether it ended as it should have."""

    tokens: Sequence[int]
    logprobs: Sequence[Mapping[int, float]]
    cached: int
    ended: bool


class Difference(NamedTuple):
    """Of an answer from its recompute, up to the first token that differs: behind it they have different
    contexts.

    tokens: that were compared. place: of the first that differs (None: none does). gap: nats between the
    recompute's two best tokens there. deltas: of log-probabilities, in nats.
    """

    tokens: int
    place: int | None
    gap: float
    deltas: Sequence[float]


def compare(recompute: Answer, answer: Answer) -> Difference:
    """Both of the same prompt, with as many tokens."""
    deltas: list[float] = []
    for place, (theirs, ours) in enumerate(zip(recompute.logprobs, answer.logprobs, strict=True)):
        least = min(ours.values())  # what is not reported is less likely than all that is
        deltas += [abs(value - ours.get(token, min(value, least))) for token, value in theirs.items()]
        if recompute.tokens[place] != answer.tokens[place]:
            first, second = sorted(theirs.values(), reverse=True)[:2]
            return Difference(place + 1, place, first - second, deltas)
    return Difference(len(answer.tokens), None, 0.0, deltas)


@dataclass(frozen=True)
class Rule:
    """tie: nats between two tokens within which either may come; None: tokens are not asked to agree, as
    where experts are chosen by rounded scores. mean: nats that log-probabilities may differ by on average."""

    tie: float | None
    mean: float

    @classmethod
    def of(cls, exact: bool, experts: bool) -> Rule:
        """Without a control. `exact`: everything is in fp32; `experts`: the model has some."""
        if exact:
            return cls(FP32_TIE, FP32_MEAN)
        return cls(None if experts else LOW_TIE, LOW_MEAN)

    def beside(self, own: Sequence[Difference], all_: Sequence[Difference]) -> Rule:
        """The rule where two recomputes of the same prompts differ by `own`, and those of more prompts by
        `all_`: the noise of a few answers alone is not known well."""
        noise = [[delta for difference in part for delta in difference.deltas] for part in (own, all_)]
        tie = None if self.tie is None else max(self.tie, *noise[1])
        return Rule(tie, max(self.mean, *(ABOVE_CONTROL * mean(deltas) for deltas in noise)))

    def breaks(self, difference: Difference) -> bool:
        """Whether the token that differs was none of two that tie."""
        return difference.place is not None and self.tie is not None and difference.gap > self.tie
