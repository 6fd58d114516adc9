"""Percentiles, throughput and goodput of a run.

Owns what the words mean. First token: from sending to the first piece with text. Whole answer: from sending
to the last byte. Between pieces: what a reader waits. Per token: a gap over the tokens of the piece behind
it, where the server tells how many those are; else over the mean of that answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from denim.errors import ConfigError

if TYPE_CHECKING:
    from denim.commands.bench.client import Measured

PERCENTILES = "50,90,99"
LIMITS = ("ttft", "tpot", "e2el")
"""What a goodput can ask for, of each request, by vLLM's names: first token, mean time per token after it,
whole answer."""


def parse_percentiles(text: str) -> tuple[float, ...]:
    """ "50,90,99.9". Raises ConfigError."""
    try:
        wanted = tuple(float(part) for part in text.split(","))
    except ValueError:
        wanted = (-1.0,)
    if not all(0 < p < 100 for p in wanted):
        raise ConfigError(f"--percentiles is {text!r}; give numbers between 0 and 100: {PERCENTILES}")
    return wanted


def parse_goodput(text: str | None) -> dict[str, float]:
    """ "ttft=500,tpot=50,e2el=5000", in milliseconds, as seconds. Raises ConfigError."""
    limits: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _, value = part.strip().partition("=")
        try:
            limit = float(value) / 1000
        except ValueError:
            limit = -1.0
        if name not in LIMITS or not limit > 0:
            raise ConfigError(f"--goodput is {text!r}; give milliseconds by name: ttft=500,tpot=50,e2el=5000")
        limits[name] = limit
    return limits


def first_token(one: Measured) -> float:
    return one.pieces[0] - one.sent


def whole_answer(one: Measured) -> float:
    return one.ended - one.sent


def gaps(one: Measured) -> list[float]:
    """Seconds between two pieces."""
    return [after - before for before, after in zip(one.pieces, one.pieces[1:], strict=False)]


def per_token(one: Measured) -> list[float]:
    """Seconds per token behind the first piece, one value a token where pieces tell their tokens."""
    if all(one.piece_tokens):
        return [gap / n for gap, n in zip(gaps(one), one.piece_tokens[1:], strict=True) for _ in range(n)]
    mean = max(1.0, (one.output_tokens or len(one.pieces)) / len(one.pieces))
    return [gap / mean for gap in gaps(one)]


def mean_per_token(one: Measured) -> float:
    """From the first piece to the last, over the tokens that came in between; 0 for an answer in one
    piece."""
    values = per_token(one)
    return sum(values) / len(values) if values else 0.0


def figures(
    measured: Sequence[Measured],
    limits: Mapping[str, float],
    tokens_known: bool,
    percentiles: Sequence[float],
) -> dict[str, Any]:
    """All numbers of a run. Seconds, tokens, and rates per second over the time from the first sending to the
    last end; a number is None where nothing was measured."""
    good = [one for one in measured if one.error is None]
    seconds = max((one.ended for one in measured), default=0.0) - min(
        (one.sent for one in measured), default=0.0
    )
    output = sum(tokens_of(one) for one in good)
    prompt = sum(one.prompt_tokens or 0 for one in good)
    cached = sum(one.cached_tokens or 0 for one in good)
    met = [one for one in good if meets(one, limits)]
    return {
        "requests": len(measured),
        "completed": len(good),
        "errors": dict(Counter(one.error for one in measured if one.error is not None).most_common()),
        "seconds": seconds,
        "prompt_tokens": prompt if tokens_known else None,
        "cached_tokens": cached if tokens_known else None,
        "output_tokens": output,
        "output_tokens_are": "tokens" if tokens_known else "pieces",
        "requests_per_second": len(good) / seconds if seconds else None,
        "output_tokens_per_second": output / seconds if seconds else None,
        "prompt_tokens_per_second": prompt / seconds if seconds and tokens_known else None,
        "peak_output_tokens_per_second": peak_rate(good) if seconds >= 1 else None,
        "peak_requests_in_work": peak_in_work(measured),
        "first_token": spread([first_token(one) for one in good], percentiles),
        "per_token_of_request": spread([mean_per_token(one) for one in good if gaps(one)], percentiles),
        "per_token": spread([value for one in good for value in per_token(one)], percentiles),
        "between_pieces": spread([gap for one in good for gap in gaps(one)], percentiles),
        "whole_answer": spread([whole_answer(one) for one in good], percentiles),
        "goodput": None
        if not limits
        else {
            "limits_seconds": dict(limits),
            "met": len(met),
            "share": len(met) / len(measured) if measured else None,
            "requests_per_second": len(met) / seconds if seconds else None,
        },
        "turns": by_turn(good),
    }


def tokens_of(one: Measured) -> int:
    """Tokens of the answer; pieces where the server does not count."""
    return len(one.pieces) if one.output_tokens is None else one.output_tokens


def peak_rate(good: Sequence[Measured]) -> float | None:
    """Most output tokens in one second of the run's clock."""
    seconds: dict[int, float] = {}
    for one in good:
        mean = tokens_of(one) / len(one.pieces)
        told = one.piece_tokens if all(one.piece_tokens) else [mean] * len(one.pieces)
        for at, tokens in zip(one.pieces, told, strict=True):
            seconds[int(at)] = seconds.get(int(at), 0) + tokens
    return max(seconds.values(), default=None)


def peak_in_work(measured: Sequence[Measured]) -> int:
    """Most requests that were in work at once."""
    changes = sorted([(one.sent, 1) for one in measured] + [(one.ended, -1) for one in measured])
    return max(accumulate(change for _, change in changes), default=0)


def meets(one: Measured, limits: Mapping[str, float]) -> bool:
    reached = {"ttft": first_token(one), "tpot": mean_per_token(one), "e2el": whole_answer(one)}
    return all(reached[name] <= limit for name, limit in limits.items())


def by_turn(good: Sequence[Measured]) -> list[dict[str, Any]]:
    """Of every turn of the conversations: requests, mean prompt and cached tokens, median first token."""
    rows = []
    for turn in sorted({one.turn for one in good}):
        those = [one for one in good if one.turn == turn]
        rows.append(
            {
                "turn": turn + 1,
                "requests": len(those),
                "mean_prompt_tokens": float(np.mean([one.prompt_tokens or 0 for one in those])),
                "mean_cached_tokens": float(np.mean([one.cached_tokens or 0 for one in those])),
                "median_first_token": float(np.median([first_token(one) for one in those])),
            }
        )
    return rows


def spread(values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float] | None:
    """mean, percentiles (linear between neighbours) and max; None for nothing."""
    if not values:
        return None
    found = {"mean": float(np.mean(values))}
    found |= {f"p{p:g}": float(np.percentile(values, p)) for p in percentiles}
    return found | {"max": float(max(values))}
