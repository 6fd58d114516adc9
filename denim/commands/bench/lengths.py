"""The lengths of a run as its options give them.

Owns the reading; distributions and traces are the ledger's.
"""

from __future__ import annotations

from pathlib import Path

from denim.errors import ConfigError
from denim.ledger.lengths import Lengths


def read_lengths(prompt: str, output: str, trace: Path | None) -> tuple[Lengths, Lengths]:
    """(tokens that a turn adds, tokens of its answer); of a trace, whose requests stay pairs. Raises
    ConfigError."""
    if trace is None:
        return _lengths("--prompt", prompt), _lengths("--output", output)
    both = Lengths.trace(trace)
    outputs = tuple(total - prompt for total, prompt in zip(both.totals, both.prompts, strict=True))
    return Lengths(both.name, both.prompts, both.prompts), Lengths(both.name, outputs, outputs)


def _lengths(name: str, text: str) -> Lengths:
    """ "512", or "350,1.1": a lognormal distribution's mean and the sigma of its logarithm."""
    parts = [part.strip() for part in text.split(",")]
    try:
        if len(parts) == 1 and int(parts[0]) > 0:
            return Lengths.fixed(int(parts[0]))
        if len(parts) == 2:
            return Lengths.lognormal(float(parts[0]), float(parts[1]))
    except ValueError:
        pass
    raise ConfigError(f"{name} is {text!r}; give tokens, or a mean and a sigma: 512 or 350,1.1")
