"""What is asked: prompts that are known up to a random position, and what follows there.

Owns the draw. Everything follows from the seed; knows no engine.
"""

from __future__ import annotations

import random
from typing import NamedTuple

SIBLINGS = 4

BEYOND = 256
"""Tokens up to which a long head reaches beyond its block: a block takes long enough to compute."""


class Probe(NamedTuple):
    """A prompt of which the first `position` tokens are left in the cache before it is asked."""

    prompt: list[int]
    position: int

    @property
    def head(self) -> list[int]:
        return self.prompt[: self.position]

    @property
    def tail(self) -> int:
        return len(self.prompt) - self.position


class Sizes(NamedTuple):
    """Tokens at whose multiples something begins: what is next to them is where mistakes hide. `width` of the
    convolution, `page`, `chunk`; `block`: of the policies that save on a grid."""

    width: int
    page: int
    chunk: int
    block: int


class Probes(NamedTuple):
    """each: at random positions, with tails around all sizes. long: reach beyond a block, for policies that
    save on its grid; empty where the model's context does not. siblings: prompts that share a head.
    """

    each: list[Probe]
    long: list[Probe]
    siblings: list[Probe]


def draw_probes(seed: int, count: int, longest: int, context: int, sizes: Sizes, vocab: int) -> Probes:
    """`count` probes whose heads have up to `longest` tokens. `context`: the most tokens of any prompt."""
    chance = random.Random(seed)

    def tokens(length: int) -> list[int]:
        return [chance.randrange(vocab) for _ in range(length)]

    edges = [around + step for around in sizes[:3] for step in (-1, 0, 1)]
    tails = [1, 2, *(length for length in edges if length > 2)]
    chance.shuffle(tails)
    each = []
    for number in range(count):
        tail = tails[number % len(tails)]
        position = chance.randint(2, max(2, longest - tail))
        each.append(Probe(tokens(position + tail), position))
    long = []
    if sizes.block + BEYOND + max(tails) <= context:
        for tail in tails[: max(1, count // 4)]:
            position = sizes.block + chance.randint(1, BEYOND)
            long.append(Probe(tokens(position + tail), position))
    position = chance.randint(max(2, longest // 2), longest)
    head = tokens(position)
    siblings = [Probe(head + tokens(chance.choice(tails)), position) for _ in range(SIBLINGS)]
    return Probes(each, long, siblings)
