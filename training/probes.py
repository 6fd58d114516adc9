"""Questions about a context: one planted fact, registers that were set, the end of a walk.

Owns contexts of an exact length and the answers that count as right. Knows tasks and tokens; must not know
the model that is asked.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from training.tasks import REGISTER_NAMES, WALK_CELLS, Builder, Kit, planted_facts, with_facts

STEPS_AFTER = 4  # of a walk, between the cut and the question


class Tail(NamedTuple):
    """What follows a context, and which of its tokens are scored."""

    ids: list[int]
    scored: list[bool]


class Case(NamedTuple):
    """A context, of one length for all cases of a batch, and the tails of which one must come out right."""

    context: list[int]
    tails: list[Tail]


def tail_of(kit: Kit, parts: list[tuple[str, bool]]) -> Tail:
    ids: list[int] = []
    scored: list[bool] = []
    for text, counts in parts:
        new = kit.encode(text).tolist()
        ids += new
        scored += [counts] * len(new)
    return Tail(ids, scored)


def recall_case(rng: Generator, length: int, kit: Kit) -> Case:
    """A chat whose question asks for the one code or name planted in `length` tokens of held-out text."""
    (fact,) = planted_facts(rng, 1)
    builder = Builder(kit)
    builder.add("<|im_start|>user\n", 0.0)
    room = length - builder.size - len(kit.encode(f"\n{fact.told}\n"))
    filler = np.concatenate([kit.text(rng, room, "held_out") for _ in range(2)])[:room]
    while len(filler) < room:
        filler = np.concatenate((filler, kit.text(rng, room, "held_out")))[:room]
    with_facts(builder, filler, [fact], [int(rng.integers(room))])
    asked = f"\n\n{fact.question}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    forms = (f"{fact.sentence}<|im_end|>", f"{fact.answer}.<|im_end|>")
    tails = [tail_of(kit, [(asked, False), (form, True)]) for form in forms]
    return Case(builder.row(length).ids.tolist(), tails)


def _context(kit: Kit, title: str, lines: list[list[int]]) -> list[int]:
    """Title and lines; lines of one task all have the same number of tokens, so contexts do too."""
    return [i for line in [kit.encode(title).tolist(), *lines] for i in line]


def registers_case(rng: Generator, length: int, kit: Kit) -> Case:
    """`length` tokens of registers being set; then each is read once. A guess is right one time in ten."""
    lines = []
    values: dict[str, int] = {}
    while sum(map(len, lines)) < length:
        name = REGISTER_NAMES[rng.integers(len(REGISTER_NAMES))]
        values[name] = int(rng.integers(10))
        lines.append(kit.encode(f"{name}={values[name]}\n").tolist())
    names = [list(values)[i] for i in rng.permutation(len(values))]
    parts = [part for n in names for part in ((f"{n}?", False), (f"{values[n]}", True), ("\n", False))]
    return Case(_context(kit, "Registers\n", lines), [tail_of(kit, parts)])


def walk_case(rng: Generator, length: int, kit: Kit) -> Case:
    """A walk of `length` tokens, four more steps, and then the place. The wall first met tells where one is,
    so a model that knows only the last steps is sometimes right too."""
    lines = []
    place = 0
    while sum(map(len, lines)) < length:
        step = 1 if rng.random() < 0.5 else -1
        place = min(WALK_CELLS - 1, max(0, place + step))
        lines.append(kit.encode("up\n" if step > 0 else "down\n").tolist())
    parts = []
    for _ in range(STEPS_AFTER):
        step = 1 if rng.random() < 0.5 else -1
        place = min(WALK_CELLS - 1, max(0, place + step))
        parts.append(("up\n" if step > 0 else "down\n", False))
    parts += [("at ", False), (f"{place}", True), ("\n", False)]
    return Case(_context(kit, "Walk\n", lines), [tail_of(kit, parts)])
