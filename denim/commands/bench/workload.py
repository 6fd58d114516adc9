"""Who asks for what, and when: the conversations of a run, drawn before it begins.

Owns the drawing. Texts are random words, so that two conversations agree in nothing but the prefix that they
were given to share. Knows no server; how many words make a token it is told.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import NamedTuple

from denim.errors import ConfigError
from denim.ledger.lengths import Lengths

WORDS = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work number night point home water "
    "room mother area money story fact month lot right study book eye job word business issue side kind "
    "head house service friend father power hour game line end member law car city name team minute idea "
    "body back parent face level office door health person art war history party result change morning "
    "reason moment air teacher force order field land river mountain paper letter music stone garden "
    "winter summer island bridge market village window table color green silver early little young large "
    "small open clear simple strong"
).split()
"""Common words, each one or two tokens for most tokenizers."""


@dataclass(frozen=True)
class Wishes:
    """What the run shall be. Lengths are in tokens.

    requests: in all; `turns` of them are one conversation. prompts: what each turn adds, outputs: its answer;
    `paired`: prompts and outputs are of one trace, and drawn together. rate: conversations that begin per
    second, at random (Poisson); inf: all at once. think: seconds from an answer to the next turn. shared:
    tokens of system text, of which there are `prefixes`; 0: none.
    """

    requests: int
    turns: int
    prompts: Lengths
    outputs: Lengths
    paired: bool
    rate: float
    think: float
    shared: int
    prefixes: int
    seed: int

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        for name, value in (("requests", self.requests), ("turns", self.turns), ("prefixes", self.prefixes)):
            if value < 1:
                raise ConfigError(f"--{name} is {value}; it must be at least 1")
        if not self.rate > 0:
            raise ConfigError(f"--rate is {self.rate:g}; it must be above 0, or inf")
        for name, seconds in (("think", self.think), ("shared-prefix", float(self.shared))):
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ConfigError(f"--{name} is {seconds:g}; it must be 0 or more")


class Turn(NamedTuple):
    """One request: what is said, and how many tokens may be answered."""

    text: str
    output_tokens: int


class Session(NamedTuple):
    """A conversation that begins `start` seconds into the run. `system` "" where nothing is shared."""

    start: float
    system: str
    turns: tuple[Turn, ...]


def sessions_of(wishes: Wishes, words_per_token: float) -> list[Session]:
    """The run's conversations in the order of their start; the same for the same seed."""
    draw = random.Random(wishes.seed)
    systems = [text_of(wishes.shared, words_per_token, draw) for _ in range(wishes.prefixes)]
    sessions: list[Session] = []
    start, left = 0.0, wishes.requests
    while left:
        turns = min(wishes.turns, left)
        left -= turns
        said = tuple(_turn(wishes, words_per_token, draw) for _ in range(turns))
        sessions.append(Session(start, draw.choice(systems), said))
        start += draw.expovariate(wishes.rate) if math.isfinite(wishes.rate) else 0.0
    return sessions


def text_of(tokens: int, words_per_token: float, draw: random.Random) -> str:
    """Random words of about so many tokens."""
    if tokens == 0:
        return ""
    return " ".join(draw.choices(WORDS, k=max(1, round(tokens * words_per_token))))


def _turn(wishes: Wishes, words_per_token: float, draw: random.Random) -> Turn:
    if wishes.paired:
        at = draw.randrange(len(wishes.prompts.totals))
        prompt, output = wishes.prompts.totals[at], wishes.outputs.totals[at]
    else:
        prompt, output = draw.choice(wishes.prompts.totals), draw.choice(wishes.outputs.totals)
    return Turn(text_of(prompt, words_per_token, draw), max(1, output))
