"""One sequence on its way through the scheduler.

Owns the record: what is known of the sequence, how much of it has been computed, and what memory it
holds. Only the scheduler changes it; the engine makes it and reads it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from denim.cache.node import as_tokens
from denim.memory.layout import SLOT
from denim.scheduler.reuse import Reuse

UNKNOWN = -1  # a token that a step draws and the host has not seen yet


class Status(Enum):
    WAITING = "waiting"  # holds no memory; computed is 0
    RUNNING = "running"  # holds a slot and the pages of all its known tokens
    SWAPPED = "swapped"  # its first `computed` tokens lie in host memory
    FINISHED = "finished"


@dataclass(eq=False)
class Family:
    """Requests over one prompt (`n` > 1) of which one, the leader, computes the prompt for all.

    The leader's prefill stops one token before the prompt's end. There every member that is waiting and
    for which memory is there begins from the leader's state and pages, applies the last prompt token
    itself and samples on its own; the others compute the prompt themselves, the next of them as leader.

    `leader` is the running member that has not passed that point yet; `unstarted` counts members that
    have never run.
    """

    leader: Request | None = None
    unstarted: int = 0


@dataclass(eq=False, slots=True)
class Request:
    """`id` must never have been used before in this engine.

    `priority`: lower goes first (vLLM's meaning). `sampling` is handed to the runner unread, and must not
    be None. `prompt_logprobs`: how many top log-probabilities to report for each prompt token, None for
    no report; with a family it is asked from one member only. `family` is one object for all members.
    `reuse`: what it has to do with the prefix cache; None: nothing.
    """

    id: int
    prompt_ids: Sequence[int]
    max_tokens: int
    sampling: Any
    priority: int = 0
    prompt_logprobs: int | None = None
    family: Family | None = None  # None from the moment a member is on its own
    reuse: Reuse | None = None

    status: Status = field(default=Status.WAITING, init=False)
    finish_reason: str | None = field(default=None, init=False)
    tokens: array[int] = field(init=False)  # the prompt and all that was drawn; the last may be UNKNOWN
    computed: int = field(default=0, init=False)  # the first so many are applied to slot and pages
    scored: int = field(default=0, init=False)  # prompt positions whose report was already made
    slot: int = field(default=-1, init=False)
    pages: array[int] = field(default_factory=lambda: array("i"), init=False)
    preemptions: int = field(default=0, init=False)
    most_tokens: int = field(init=False)  # of prompt and output together
    key: tuple[int, int] = field(default=(0, 0), init=False)  # (priority, arrival): the place in every order

    def __post_init__(self) -> None:
        self.tokens = as_tokens(self.prompt_ids)[:]
        self.most_tokens = len(self.tokens) + self.max_tokens

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.prompt_ids)

    @property
    def exhausted(self) -> bool:
        """All tokens that it may have are drawn, and it only waits to be told so."""
        return len(self.tokens) >= self.most_tokens

    @property
    def known(self) -> array[int]:
        """The tokens but for those at the end that are still to be drawn. Not to be changed."""
        end = len(self.tokens)
        while end and self.tokens[end - 1] == UNKNOWN:
            end -= 1
        return self.tokens if end == len(self.tokens) else self.tokens[:end]

    @property
    def remaining(self) -> int:
        """Known tokens that are not computed yet; at least 1 between steps."""
        return len(self.tokens) - self.computed

    @property
    def state_slot(self) -> int:
        """The slot that holds the state after `computed` tokens: its own, or a checkpoint's."""
        reuse = self.reuse
        return self.slot if reuse is None or reuse.state < 0 else reuse.state

    @property
    def fork_point(self) -> int:
        """Where a leader stops for its family: one token of the prompt is left to every member."""
        return len(self.prompt_ids) - 1

    def moved(self, name: str, targets: Mapping[int, int]) -> int:
        """Entries have new ids, old -> new. Returns how many of its own were among them."""
        changed = 0 if self.reuse is None else self.reuse.moved(name, targets)
        if name == SLOT:
            if self.slot not in targets:
                return changed
            self.slot = targets[self.slot]
            return changed + 1
        if targets.keys().isdisjoint(self.pages):
            return changed
        changed += sum(page in targets for page in self.pages)
        self.pages = array("i", [targets.get(page, page) for page in self.pages])
        return changed

    def leave_family(self) -> None:
        """Be on its own from here on."""
        family, self.family = self.family, None
        if family is not None:
            if family.leader is self:
                family.leader = None
            else:
                family.unstarted -= 1
