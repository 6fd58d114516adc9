"""Percentiles, throughput and goodput of a run.

Owns what the words mean. First token: from sending to the first piece with text. Whole answer: from sending
to the last byte. Between pieces: what a reader waits. Per token: a gap over the tokens of the piece behind
it, where the server tells how many those are; else over the mean of that answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from denim.errors import ConfigError

if TYPE_CHECKING:
    from denim.commands.bench.client import Measured

PERCENTILES = (50, 90, 99)
LIMITS = ("ttft", "itl", "e2e")
"""What a goodput can ask for, of each request: first token, mean time per token after it, whole answer."""


def parse_goodput(text: str | None) -> dict[str, float]:
    """ "ttft=500,itl=50,e2e=5000", in milliseconds, as seconds. Raises ConfigError."""
    limits: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _, value = part.strip().partition("=")
        try:
            limit = float(value) / 1000
        except ValueError:
            limit = -1.0
        if name not in LIMITS or not limit > 0:
            raise ConfigError(f"--goodput is {text!r}; give milliseconds by name: ttft=500,itl=50,e2e=5000")
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


def figures(measured: Sequence[Measured], limits: Mapping[str, float], tokens_known: bool) -> dict[str, Any]:
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
        "first_token": spread([first_token(one) for one in good]),
        "per_token": spread([value for one in good for value in per_token(one)]),
        "between_pieces": spread([gap for one in good for gap in gaps(one)]),
        "whole_answer": spread([whole_answer(one) for one in good]),
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


def meets(one: Measured, limits: Mapping[str, float]) -> bool:
    reached = {"ttft": first_token(one), "itl": mean_per_token(one), "e2e": whole_answer(one)}
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


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """mean, percentiles (linear between neighbours) and max; None for nothing."""
    if not values:
        return None
    found = {"mean": float(np.mean(values))}
    found |= {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return found | {"max": float(max(values))}
