"""Where checkpoints are saved: the named policies.

Owns one small function a policy. Each looks at one request and names positions of its prompt; whether the
generation's end is kept as well is a fact of the policy. Knows nothing of trees or memory.

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
    """What policies go by. block: tokens whose KV weighs as much as a checkpoint, on the chunk grid.
    segment: the most tokens that are prefilled in one step. chunk: what saves fewer tokens than a chunk is
    not worth a checkpoint. depths: how deep requests agreed with earlier
    ones so far.
    """

    block: int
    segment: int
    chunk: int
    depths: OverlapDepths


Strategy = Callable[[Sighting, Grid], list[Wanted]]


@dataclass(frozen=True)
class Policy:
    """`strategy` names positions inside the prompt. `generation_end`: the state that a request ends with is
    kept."""

    name: str
    strategy: Strategy
    generation_end: bool = False

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


def align(sighting: Sighting, grid: Grid) -> list[Wanted]:
    """The last block boundary in each prefill segment."""
    goals = [*range(sighting.start + grid.segment, sighting.prompt, grid.segment), sighting.prompt - 1]
    return [Wanted(goal // grid.block * grid.block, BLOCK) for goal in goals]


def all_blocks(sighting: Sighting, grid: Grid) -> list[Wanted]:
    """Every block boundary."""
    return [Wanted(p, BLOCK) for p in range(grid.block, sighting.prompt, grid.block)]


def ends(sighting: Sighting, grid: Grid) -> list[Wanted]:
    """One token before the prompt's end."""
    return [Wanted(sighting.prompt - 1, PROMPT_END)]


def auto(sighting: Sighting, grid: Grid) -> list[Wanted]:
    """What the request marks, what the template names, where it leaves a known path, its end; and where no
    template says what will be shared, a few positions in a very long new part."""
    optional = [Wanted(p, BOUNDARY) for p in sighting.boundaries[:-1]]
    optional.append(Wanted(sighting.seen, JUNCTION))
    if not any(sighting.prompt - grid.chunk <= p < sighting.prompt for p in sighting.boundaries):
        optional += ends(sighting, grid)
    if not sighting.boundaries:
        known = max(sighting.start, sighting.seen)
        optional += [Wanted(p, SPACED) for p in grid.depths.spaced(known, sighting.prompt)]
    # The last boundary is what the next turn begins from, however short this turn is.
    asked = [Wanted(p, MARK) for p in sighting.marks]
    asked += [Wanted(p, BOUNDARY) for p in sighting.boundaries[-1:]]
    return asked + [wanted for wanted in optional if wanted.position - sighting.start >= grid.chunk]


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("none", none),
        Policy("align", align),
        Policy("all", all_blocks),
        Policy("ends", ends, generation_end=True),
        Policy("auto", auto, generation_end=True),
    )
}
