"""Who asks for what, and when: the conversations of a run, drawn before it begins.

Owns the drawing. Texts are random words, so that two conversations agree in nothing but the prefix that they
were given to share. Knows no server; how many words make a token, and what a server takes, it is told.
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
    second, at random; inf: all at once. burstiness: shape of the gamma distribution of the times between
    them; 1: Poisson, less: in bursts, more: evenly. think: seconds from an answer to the next turn. shared:
    tokens of system text, of which there are `prefixes`; 0: none.
    """

    requests: int
    turns: int
    prompts: Lengths
    outputs: Lengths
    paired: bool
    rate: float
    burstiness: float
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
        if not (math.isfinite(self.burstiness) and self.burstiness > 0):
            raise ConfigError(f"--burstiness is {self.burstiness:g}; it must be above 0")
        for name, seconds in (("think", self.think), ("shared-prefix", float(self.shared))):
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ConfigError(f"--{name} is {seconds:g}; it must be 0 or more")


SLACK = 0.02
"""Of a prompt's tokens: so much longer than wished for may its words turn out."""


REDRAWS = 10_000
"""Lengths in a row that do not fit, before a distribution is taken to have none that do."""


class Room(NamedTuple):
    """What a server takes: `tokens` of a prompt and its answer together, of which its template takes
    `template` a turn."""

    tokens: int
    template: int

    def holds(self, prompt: int, answer: int, turns: int) -> bool:
        """Whether a conversation of so many tokens and turns has room for its answer."""
        return (prompt + turns * self.template) * (1 + SLACK) + answer <= self.tokens


class Turn(NamedTuple):
    """One request: what is said, and how many tokens may be answered."""

    text: str
    output_tokens: int


class Session(NamedTuple):
    """A conversation that begins `start` seconds into the run. `system` "" where nothing is shared."""

    start: float
    system: str
    turns: tuple[Turn, ...]


class Drawn(NamedTuple):
    """The run's conversations in the order of their start. `redrawn`: lengths that did not fit and were drawn
    again; `ended`: conversations that end before their last turn, which would not fit."""

    sessions: list[Session]
    redrawn: int
    ended: int


def draw_sessions(wishes: Wishes, words_per_token: float, room: Room) -> Drawn:
    """The same for the same seed. Raises ConfigError where (all but) no turn fits."""
    draw = random.Random(wishes.seed)
    if not room.holds(wishes.shared, 0, 1):  # before its text is made
        raise _too_long(wishes, room)
    systems = [text_of(wishes.shared, words_per_token, draw) for _ in range(wishes.prefixes)]
    sessions: list[Session] = []
    start, left, redrawn, ended = 0.0, wishes.requests, 0, 0
    while left:
        turns: list[Turn] = []
        said, misses = wishes.shared, 0
        while len(turns) < min(wishes.turns, left):
            prompt, answer = _lengths(wishes, draw)
            if room.holds(said + prompt, answer, len(turns) + 1):
                turns.append(Turn(text_of(prompt, words_per_token, draw), answer))
                said += prompt + answer
            elif turns:
                ended += 1
                break
            elif misses == REDRAWS:
                raise _too_long(wishes, room)
            else:
                misses += 1
        redrawn += misses
        left -= len(turns)
        sessions.append(Session(start, draw.choice(systems), tuple(turns)))
        if math.isfinite(wishes.rate):
            start += draw.gammavariate(wishes.burstiness, 1 / (wishes.burstiness * wishes.rate))
    return Drawn(sessions, redrawn, ended)


def _too_long(wishes: Wishes, room: Room) -> ConfigError:
    return ConfigError(
        f"--shared-prefix ({wishes.shared:,} tokens), prompts ({wishes.prompts.name}) and answers"
        f" ({wishes.outputs.name}) are more than the {room.tokens:,} tokens that the server takes; give"
        " shorter ones"
    )


def text_of(tokens: int, words_per_token: float, draw: random.Random) -> str:
    """Random words of about so many tokens."""
    if tokens == 0:
        return ""
    return " ".join(draw.choices(WORDS, k=max(1, round(tokens * words_per_token))))


def _lengths(wishes: Wishes, draw: random.Random) -> tuple[int, int]:
    """Tokens that a turn adds, and those of its answer."""
    if wishes.paired:
        at = draw.randrange(len(wishes.prompts.totals))
        prompt, answer = wishes.prompts.totals[at], wishes.outputs.totals[at]
    else:
        prompt, answer = draw.choice(wishes.prompts.totals), draw.choice(wishes.outputs.totals)
    return prompt, max(1, answer)
