"""What one request has to do with the prefix cache.

Owns the record: what the request asked for, and which entries it holds beside its own slot and pages. Only
`denim.scheduler.prefixes` changes it, and the compactor's moves do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from denim.cache.node import Node
from denim.cache.positions import Wanted
from denim.cache.prefix_cache import Lease, Namespace
from denim.memory.layout import SLOT


@dataclass(eq=False, slots=True)
class Reuse:
    """`store`: whether anything of the request may be kept. `boundaries`, `marks`: positions in the prompt
    that the chat template and the request name.

    A request's state lies in `state` instead of its own slot behind a hit, and behind a segment that ended
    where a checkpoint is wanted: the next span reads it there and writes the request's own slot, so neither
    is ever copied. `reserved` are the slots that take the next wanted checkpoints, in their order. `source`
    is a page that the step in the making copies. Each is held once; state and source are -1 where there is
    none.
    """

    namespace: Namespace
    store: bool
    boundaries: Sequence[int]
    marks: Sequence[int]

    lease: Lease | None = field(default=None, init=False)  # None: never began
    wanted: list[Wanted] = field(default_factory=list, init=False)  # positions to come, in order
    state: int = field(default=-1, init=False)
    reserved: list[int] = field(default_factory=list, init=False)
    source: int = field(default=-1, init=False)
    cached: int = field(default=0, init=False)  # tokens that it did not compute when it first began
    saved: list[Node] = field(default_factory=list, init=False)
    sought: bool = field(default=False, init=False)  # whether the lower tiers were asked for it
    loads: int = field(default=0, init=False)  # how often something came up from there for it

    @property
    def next_save(self) -> int | None:
        """The position of the first checkpoint that has a slot."""
        return self.wanted[0].position if self.reserved else None

    @property
    def idle(self) -> bool:
        """Nothing is wanted, and the state lies in the request's own slot: so for nearly every decode row."""
        return self.state < 0 and not self.wanted

    def moved(self, name: str, targets: Mapping[int, int]) -> int:
        """Entries have new ids, old -> new. Returns how many of its own were among them."""
        if name != SLOT:
            changed = int(self.source in targets)
            self.source = targets.get(self.source, self.source)
            return changed
        changed = sum(slot in targets for slot in (self.state, *self.reserved))
        self.state = targets.get(self.state, self.state)
        self.reserved = [targets.get(slot, slot) for slot in self.reserved]
        return changed
