"""An arena that counts bytes and nothing else: any free byte serves pages and slots alike.

Owns counts of holders, as `denim.memory.arena.Arena` does, without slabs. For the lower tiers, where no
kernel reads; and for replays of traces: the engine joins scattered memory, so that what it loses to slabs is
small and of no concern to a policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count

from denim.errors import CheckpointError
from denim.memory.layout import ArenaLayout


class ByteArena:
    """`capacity` bytes for entries of the classes of `layout`, by their strides. No two entries ever have the
    same id, of whatever class. `on_free` is called with entries that have just lost their last holder."""

    def __init__(
        self,
        layout: ArenaLayout,
        capacity: int,
        on_free: Callable[[list[int]], None] | None = None,
    ) -> None:
        self.layout = layout
        self.capacity = capacity
        self._on_free = on_free
        self.free = capacity
        self.num_slabs = capacity // max(size.stride for size in layout.classes)  # of the largest entry each
        self._holders: dict[str, dict[int, int]] = {size.name: {} for size in layout.classes}
        self._bytes = {size.name: size.stride for size in layout.classes}
        self._ids = count()
        self._tags: dict[int, int] = {}

    def can_alloc(self, need: Mapping[str, int]) -> bool:
        return sum(self._bytes[name] * n for name, n in need.items()) <= self.free

    def alloc_many(self, name: str, n: int) -> list[int] | None:
        """`n` entries, each held once; None, and nothing taken, when there is no room."""
        if not self.can_alloc({name: n}):
            return None
        return self.alloc_freely(name, n)

    def alloc_freely(self, name: str, n: int) -> list[int]:
        """`n` entries that are there already, each held once, even if they take more than the capacity."""
        if not n:
            return []
        ids = [next(self._ids) for _ in range(n)]
        self._holders[name].update(dict.fromkeys(ids, 1))
        self.free -= n * self._bytes[name]
        return ids

    def alloc(self, name: str) -> int | None:
        ids = self.alloc_many(name, 1)
        return ids[0] if ids else None

    def share(self, name: str, ids: Sequence[int]) -> None:
        holders = self._holders[name]
        for entry in ids:
            holders[entry] += 1

    def release(self, name: str, ids: Sequence[int]) -> None:
        holders = self._holders[name]
        gone = []
        for entry in ids:
            holders[entry] -= 1
            if not holders[entry]:
                del holders[entry]
                self.free += self._bytes[name]
                self._tags.pop(entry, None)
                gone.append(entry)
        if gone and self._on_free is not None:
            self._on_free(gone)

    def holders(self, name: str, entry: int) -> int:
        return self._holders[name].get(entry, 0)

    def commit(self, slot: int, tokens: int) -> None:
        self._tags[slot] = tokens

    def expect(self, slot: int, tokens: int) -> None:
        """Raises CheckpointError unless the slot stands for exactly `tokens` tokens."""
        if self._tags.get(slot) != tokens:
            raise CheckpointError(f"slot {slot} stands for {self._tags.get(slot)} tokens, not {tokens}")
