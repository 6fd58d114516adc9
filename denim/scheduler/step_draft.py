"""A step plan in the making.

Owns what the scheduler has decided of a step so far, and what later decisions must know of earlier ones.
Entries may move while it is made: it learns their new ids as every holder does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from denim.memory.layout import PAGE, SLOT
from denim.runner.plan import NO_ROWS, PageCopy, StepPlan
from denim.scheduler.spans import NOTHING_DEALT, Dealt


@dataclass
class StepDraft:
    """`forks`: member of a family -> slot of its leader's state, which it begins from. `held`: leaders that
    wait while members read it. `started`: requests that begin or resume in this step. `dealt`: what the
    step serves, once that is known."""

    plan: StepPlan = field(default_factory=lambda: StepPlan(NO_ROWS, [], [], [], []))
    forks: dict[int, int] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)
    started: set[int] = field(default_factory=set)
    dealt: Dealt = NOTHING_DEALT

    def moved(self, name: str, targets: Mapping[int, int]) -> int:
        """What comes behind the step's moves names entries by their new ids, and swap-outs by the old ones.
        Nothing of a plan is a reference that the arena counts: 0."""
        swap_in, copies = self.plan.swap_in, self.plan.page_copies
        if name == SLOT:
            swap_in[:] = [swap._replace(slot=targets.get(swap.slot, swap.slot)) for swap in swap_in]
            self.forks = {member: targets.get(slot, slot) for member, slot in self.forks.items()}
        elif name == PAGE:
            swap_in[:] = [swap._replace(pages=[targets.get(p, p) for p in swap.pages]) for swap in swap_in]
            copies[:] = [PageCopy(*(targets.get(page, page) for page in copy)) for copy in copies]
        return 0
