"""Making slabs empty by moving what is left in them, so that memory can change sides.

Owns the choice of what moves where, and the list of moves until a step carries them out. Knows ids and counts
only. Whoever keeps ids of entries is a `Holder`: it is told of every move at once, and the bytes follow when
the step runs, behind its swap-outs and before anything is written. So nothing but ids changes: page tables
are made anew for every step, and captured graphs read them from buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from denim.memory.arena import Arena
from denim.memory.layout import SizeClass


class Move(NamedTuple):
    """The content of entry `source` of class `name` goes to `target`. No target of a step lies in a slab that
    a move of the step reads, whatever class it has by then."""

    name: str
    source: int
    target: int


class Holder(Protocol):
    """Whoever keeps ids of entries from one step to the next."""

    def moved(self, name: str, targets: Mapping[int, int]) -> int:
        """Entries of class `name` have new ids, old -> new. Returns how many of the holder's own references
        to them changed."""
        ...


class Compactor:
    """Joins the free entries of an arena's slabs."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._holders: list[Holder] = []
        self._pending: dict[str, dict[int, int]] = {}  # class -> target -> source

    def watch(self, holder: Holder) -> None:
        """Tell `holder` of moves from now on. All references that the arena counts must be some holder's."""
        self._holders.append(holder)

    def make_room(self, need: Mapping[str, int]) -> bool:
        """Whether `need` can be allocated now, all together, after moving entries where that helps.

        False: nothing was moved. True whenever the free entries would be enough if they were not scattered,
        except where this would move an entry twice before a step runs, or to a slab that it is still to read.
        """
        missing = self._arena.slabs_missing(need)
        if missing <= 0:
            return True
        if sum(self._surplus(size, need) // size.count for size in self._arena.layout.classes) < missing:
            return False  # the usual answer of a full arena, without a look at its slabs
        victims = self._victims(need, missing)
        if victims is None:
            return False
        plans = []
        for name, slabs in victims.items():
            sources = [entry for slab in slabs for entry in self._arena.held_in(slab)]
            targets = self._targets(name, slabs, len(sources))
            if targets is None:
                return False
            plans.append((name, sources, targets))
        for name, sources, targets in plans:
            self._move(name, sources, targets)
        return True

    def sources(self, name: str, ids: Sequence[int]) -> list[int]:
        """Where the content of these entries lies until the pending moves are carried out."""
        pending = self._pending.get(name)
        return [pending.get(entry, entry) for entry in ids] if pending else list(ids)

    def take(self) -> list[Move]:
        """The moves of the step that is planned now, in any order; they are pending no longer."""
        moves = [
            Move(name, source, target)
            for name, pending in self._pending.items()
            for target, source in pending.items()
            if self._arena.holders(name, target)
        ]
        self._pending.clear()
        return moves

    def _surplus(self, size: SizeClass, need: Mapping[str, int]) -> int:
        """Free entries of a class in slabs of its own, beyond its own need."""
        return max(0, self._arena.free_entries(size.name) - need.get(size.name, 0))

    def _victims(self, need: Mapping[str, int], missing: int) -> dict[str, list[int]] | None:
        """The slabs to empty, by class: those with the fewest bytes to move. None: there are too few.

        A class can give ⌊surplus / entries a slab⌋ slabs.
        """
        candidates: list[tuple[int, str, int]] = []
        for size in self._arena.layout.classes:
            free = self._arena.free_in_open(size.name)
            fixed = {target // size.count for target in self._pending.get(size.name, ())}
            emptiest = sorted((size.count - n, slab) for slab, n in free.items() if slab not in fixed)
            given = self._surplus(size, need) // size.count
            candidates += [(held * size.stride, size.name, slab) for held, slab in emptiest[:given]]
        if len(candidates) < missing:
            return None
        chosen: dict[str, list[int]] = {}
        for _, name, slab in sorted(candidates)[:missing]:
            chosen.setdefault(name, []).append(slab)
        return chosen

    def _targets(self, name: str, victims: Iterable[int], n: int) -> list[int] | None:
        """Free entries for what moves, in the fullest slabs first."""
        left_out = {*victims, *self._still_read()}
        free = self._arena.free_in_open(name)
        targets: list[int] = []
        for slab in sorted(free.keys() - left_out, key=lambda slab: (free[slab], slab)):
            targets += self._arena.free_in(slab)
            if len(targets) >= n:
                return targets[:n]
        return None

    def _still_read(self) -> set[int]:
        """Slabs that pending moves read. One that was emptied may have a class again, the same or another;
        what moved there would overwrite what is to leave it."""
        count = {size.name: size.count for size in self._arena.layout.classes}
        return {
            source // count[name] for name, pending in self._pending.items() for source in pending.values()
        }

    def _move(self, name: str, sources: list[int], targets: list[int]) -> None:
        references = sum(self._arena.holders(name, entry) for entry in sources)
        self._arena.relocate(name, sources, targets)
        self._pending.setdefault(name, {}).update(zip(targets, sources, strict=True))
        new_ids = dict(zip(sources, targets, strict=True))
        told = sum(holder.moved(name, new_ids) for holder in self._holders)
        assert told == references, f"{references - told} reference(s) to moved {name}s are nobody's"
