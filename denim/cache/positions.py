"""Where checkpoints are saved: the named policies.

Owns one small function a policy. Each looks at one request and names positions of its prompt; whether the
generation's end and the ends of prefill segments are kept as well is a fact of the policy. Knows nothing of
trees or memory.

A position p stands for the first p tokens. None lies behind one token before the prompt's end: at least
one token must be left to compute, or the same prompt again could not use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from denim.cache.spacing import OverlapDepths

# Why a checkpoint was saved.
PROMPT_END = "prompt end"  # one token before it
GENERATION_END = "generation end"
BOUNDARY = "boundary"  # where the chat template says that the next turn still agrees
MARK = "mark"  # asked for by the request
JUNCTION = "junction"  # where the request left what was known
SPACED = "spaced"  # inside a very long prompt
BLOCK = "block"  # on the grid of `align` and `all`

KINDS = (PROMPT_END, GENERATION_END, BOUNDARY, MARK, JUNCTION, SPACED, BLOCK)

NEAR = 64
"""Tokens. With a boundary so close before it, a checkpoint at the prompt's end saves less than a chunk."""


class Wanted(NamedTuple):
    position: int
    kind: str


@dataclass(frozen=True)
class Sighting:
    """What is known of a request when it begins.

    start: the position that it begins from. seen: how many of its tokens were known before.
    boundaries, marks: positions that the chat template and the request name.
    """

    prompt: int
    start: int = 0
    seen: int = 0
    boundaries: Sequence[int] = ()
    marks: Sequence[int] = ()


@dataclass(frozen=True)
class Grid:
    """Sizes that policies go by. block: tokens whose KV weighs as much as a checkpoint, on the chunk grid.

    depths: how deep requests agreed with earlier ones so far.
    """

    block: int
    depths: OverlapDepths


Strategy = Callable[[Sighting, Grid], list[Wanted]]


@dataclass(frozen=True)
class Policy:
    """`strategy` names positions inside the prompt. `generation_end`: the state that a request ends with is
    kept. `segment_ends`: so is that at the end of a prefill segment which falls on the block grid."""

    name: str
    strategy: Strategy
    generation_end: bool = False
    segment_ends: bool = False

    def positions(self, sighting: Sighting, grid: Grid) -> list[Wanted]:
        """In order, each once, all behind the start and before the prompt's last token."""
        found: dict[int, str] = {}
        for position, kind in self.strategy(sighting, grid):
            if sighting.start < position < sighting.prompt:
                found.setdefault(position, kind)
        return [Wanted(position, found[position]) for position in sorted(found)]


def none(sighting: Sighting, grid: Grid) -> list[Wanted]:
    """Nothing."""
    return []


def all_blocks(sighting: Sighting, grid: Grid) -> list[Wanted]:
    """Every block boundary."""
    return [Wanted(p, BLOCK) for p in range(grid.block, sighting.prompt, grid.block)]


def ends(sighting: Sighting, grid: Grid) -> list[Wanted]:
    """One token before the prompt's end."""
    return [Wanted(sighting.prompt - 1, PROMPT_END)]


def auto(sighting: Sighting, grid: Grid) -> list[Wanted]:
    """What the request marks, what the template names, where it leaves a known path, its end; and where no
    template says what will be shared, a few positions in a very long new part."""
    wanted = [Wanted(p, MARK) for p in sighting.marks]
    wanted += [Wanted(p, BOUNDARY) for p in sighting.boundaries]
    if sighting.seen > sighting.start:
        wanted.append(Wanted(sighting.seen, JUNCTION))
    if not any(sighting.prompt - NEAR <= p < sighting.prompt for p in sighting.boundaries):
        wanted += ends(sighting, grid)
    if not sighting.boundaries:
        known = max(sighting.start, sighting.seen)
        wanted += [Wanted(p, SPACED) for p in grid.depths.spaced(known, sighting.prompt)]
    return wanted


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("none", none),
        Policy("align", none, segment_ends=True),
        Policy("all", all_blocks, segment_ends=True),
        Policy("ends", ends, generation_end=True),
        Policy("auto", auto, generation_end=True),
    )
}
