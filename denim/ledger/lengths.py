"""How long the requests of a workload are: one length, a lognormal distribution, or a trace.

Owns reading and checking them. Knows nothing of models or bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import isfinite
from pathlib import Path
from statistics import NormalDist
from typing import Any

from denim.errors import ConfigError

QUANTILES = 1000
"""Lengths that stand for a lognormal distribution: the means of so many equal shares of it."""

PROMPT_KEYS = ("prompt_length", "prompt_tokens", "input_length", "input_tokens")
OUTPUT_KEYS = ("output_length", "output_tokens", "completion_tokens")
"""Names of the two lengths in a trace; `input_length` and `output_length` are Mooncake's."""


@dataclass(frozen=True)
class Lengths:
    """Requests, each as likely as any other: `prompts[i]` of its `totals[i]` tokens are its prompt."""

    name: str
    prompts: tuple[int, ...]
    totals: tuple[int, ...]

    @classmethod
    def fixed(cls, tokens: int) -> Lengths:
        """Requests of `tokens` tokens, counted as prompt."""
        return cls(f"{tokens:,} tokens", (tokens,), (tokens,))

    @classmethod
    def lognormal(cls, mean: float, sigma: float) -> Lengths:
        """Lengths with arithmetic mean `mean`, whose logarithm has the standard deviation `sigma`.

        Raises ConfigError unless the mean is at least 1 and sigma at least 0.
        """
        if not (isfinite(mean) and isfinite(sigma) and mean >= 1 and sigma >= 0):
            raise ConfigError(
                f"lognormal lengths of mean {mean:g}, sigma {sigma:g}: the mean must be at least 1, sigma 0"
            )
        # With X = exp(mu + sigma Z), E[X; a < Z < b] = E[X] (Φ(b - sigma) - Φ(a - sigma)).
        normal = NormalDist()
        bounds = [normal.inv_cdf(i / QUANTILES) for i in range(1, QUANTILES)]
        below = [0.0, *(normal.cdf(z - sigma) for z in bounds), 1.0]
        tokens = tuple(max(1, round(mean * QUANTILES * (b - a))) for a, b in pairwise(below))
        return cls(f"lognormal {mean:g}, σ {sigma:g}", tokens, tokens)

    @classmethod
    def trace(cls, path: Path) -> Lengths:
        """From a JSON object a line with a prompt's and an output's length.

        Raises ConfigError naming the line and what it lacks.
        """
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--trace {path} cannot be read: {error}; give another") from error
        pairs = [_pair(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
        if not pairs:
            raise ConfigError(f"--trace {path} has no request; give a file with one a line")
        return cls(path.name, tuple(p for p, _ in pairs), tuple(p + o for p, o in pairs))

    def within(self, longest: int) -> Lengths:
        """Those of at most `longest` tokens. Raises ConfigError when none is left."""
        if max(self.totals) <= longest:
            return self
        kept = [(p, t) for p, t in zip(self.prompts, self.totals, strict=True) if t <= longest]
        if not kept:
            raise ConfigError(
                f"{self.name}: the shortest request has {min(self.totals):,} tokens; this model on this "
                f"device takes at most {max(longest, 0):,}; give shorter lengths or more memory"
            )
        prompts, totals = zip(*kept, strict=True)
        return Lengths(self.name, prompts, totals)

    @property
    def mean_prompt(self) -> float:
        return sum(self.prompts) / len(self.prompts)

    @property
    def mean_tokens(self) -> float:
        return sum(self.totals) / len(self.totals)

    def mean_blocks(self, block: int) -> Fraction:
        """Mean number of blocks of `block` tokens that a request needs. Exact."""
        return Fraction(sum(-(-tokens // block) for tokens in self.totals), len(self.totals))


def _pair(path: Path, number: int, line: str) -> tuple[int, int]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--trace {path}, line {number} is not JSON: {error}; correct it") from error
    if not isinstance(row, dict):
        raise ConfigError(f"--trace {path}, line {number} is not a JSON object; make it one")
    prompt = _length(path, number, row, PROMPT_KEYS, least=1)
    return prompt, _length(path, number, row, OUTPUT_KEYS, least=0)


def _length(path: Path, number: int, row: Mapping[str, Any], keys: tuple[str, ...], least: int) -> int:
    for key in keys:
        if key in row:
            value = row[key]
            if isinstance(value, int) and not isinstance(value, bool) and value >= least:
                return value
            raise ConfigError(
                f"--trace {path}, line {number}: {key} is {value!r}; it must be a whole "
                f"number of at least {least}"
            )
    raise ConfigError(f"--trace {path}, line {number} has none of {', '.join(keys)}; add one")
