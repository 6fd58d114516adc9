"""Who holds which page and which slot: the arena's bookkeeping.

Owns the state of every slab and entry: free or held, by how many holders, and for slots the number of
tokens that their content stands for. Knows ids and counts only, neither bytes nor devices nor requests.

An entry of a class is numbered `slab * count + index`, one numbering over the whole buffer. A slab
serves one class at a time and may change class when it is empty. New entries go to the partly used slab
with the lowest number, and an empty slab is opened only when there is none, so that use gathers at the
low end and slabs at the high end become empty again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from denim.errors import CheckpointError
from denim.memory.layout import SLOT, ArenaLayout, SizeClass


class Tag(NamedTuple):
    """What a slot stands for: `committed` tokens applied to the state, `pending` more only recorded."""

    committed: int
    pending: int = 0


@dataclass(slots=True)
class _Pool:
    """One class's side of the arena."""

    size: SizeClass
    refs: dict[int, int] = field(default_factory=dict)  # held entry -> number of holders
    open: list[int] = field(default_factory=list)  # heap of slabs that may have a free entry
    listed: set[int] = field(default_factory=set)  # the slabs in `open`; some have left the class since
    free: int = 0  # free entries in slabs of this class


class Arena:
    """Allocator over `num_slabs` slabs of `layout`. Operations cost O(entries), slab changes O(log slabs).

    `on_free(class, ids)` is called with entries that have just lost their last holder.
    """

    def __init__(
        self,
        layout: ArenaLayout,
        num_slabs: int,
        on_free: Callable[[str, list[int]], None] | None = None,
    ) -> None:
        self.layout = layout
        self.num_slabs = num_slabs
        self._on_free = on_free
        self._pools = {size.name: _Pool(size) for size in layout.classes}
        self._owner: list[_Pool | None] = [None] * num_slabs
        self._free: list[list[int]] = [[] for _ in range(num_slabs)]  # free entries of each owned slab
        self._empty = list(range(num_slabs))  # heap of slabs without a class
        self._tags: dict[int, list[int]] = {}  # held slot -> [tokens, those pending]

    # Allocation

    def alloc(self, name: str) -> int | None:
        """A free entry of class `name`, held once; None when there is none."""
        ids = self.alloc_many(name, 1)
        return ids[0] if ids else None

    def alloc_many(self, name: str, n: int) -> list[int] | None:
        """`n` entries of class `name`, each held once; None, and nothing taken, when there are fewer."""
        if n == 0:
            return []
        pool = self._pools[name]
        if n > pool.free + len(self._empty) * pool.size.count:
            return None
        ids: list[int] = []
        while len(ids) < n:
            free = self._free[self._open_slab(pool)]
            take = min(n - len(ids), len(free))
            ids += free[: -take - 1 : -1]
            del free[-take:]
            pool.free -= take
        pool.refs.update(dict.fromkeys(ids, 1))
        if name == SLOT:
            self._tags.update({slot: [0, 0] for slot in ids})
        return ids

    def share(self, name: str, ids: Sequence[int]) -> None:
        """Count one more holder of each of these entries."""
        refs = self._pools[name].refs
        for entry in ids:
            refs[entry] += 1

    def release(self, name: str, ids: Sequence[int]) -> None:
        """Drop one holder of each of these entries; those without a holder left become free.

        Raises KeyError when an entry is not held (released twice: a bug of the caller).
        """
        refs = self._pools[name].refs
        gone = []
        for entry in ids:
            holders = refs[entry]
            if holders > 1:
                refs[entry] = holders - 1
            else:
                del refs[entry]
                gone.append(entry)
        self._give_back(self._pools[name], gone)
        if name == SLOT:
            for entry in gone:
                del self._tags[entry]
        if gone and self._on_free is not None:
            self._on_free(name, gone)

    def holders(self, name: str, entry: int) -> int:
        """How many hold this entry; 0 when it is free."""
        return self._pools[name].refs.get(entry, 0)

    def can_alloc(self, need: Mapping[str, int]) -> bool:
        """Whether all of these could be allocated now, together. Exact."""
        return self.slabs_missing(need) <= 0

    def slabs_missing(self, need: Mapping[str, int]) -> int:
        """How many more empty slabs it takes to allocate all of these; 0 or less: it can be done now."""
        slabs = 0
        for name, n in need.items():
            if n:
                pool = self._pools[name]
                slabs += -(-max(0, n - pool.free) // pool.size.count)
        return slabs - len(self._empty)

    def _open_slab(self, pool: _Pool) -> int:
        """The slab that serves the next entry of this class. There must be one with a free entry."""
        while pool.open:
            slab = pool.open[0]
            if self._owner[slab] is pool and self._free[slab]:
                return slab
            pool.listed.discard(heappop(pool.open))
        slab = heappop(self._empty)
        count = pool.size.count
        self._owner[slab] = pool
        self._free[slab] = list(range((slab + 1) * count - 1, slab * count - 1, -1))
        pool.free += count
        self._list(pool, slab)
        return slab

    def _give_back(self, pool: _Pool, ids: list[int]) -> None:
        count = pool.size.count
        for entry in ids:
            slab = entry // count
            free = self._free[slab]
            free.append(entry)
            if len(free) == count:
                self._owner[slab] = None
                free.clear()
                pool.free -= count - 1
                heappush(self._empty, slab)
            else:
                pool.free += 1
                self._list(pool, slab)

    @staticmethod
    def _list(pool: _Pool, slab: int) -> None:
        if slab not in pool.listed:
            pool.listed.add(slab)
            heappush(pool.open, slab)

    # What compaction needs (denim.memory.compaction)

    def free_in_open(self, name: str) -> dict[int, int]:
        """Slabs of class `name` that have free entries, and how many."""
        pool = self._pools[name]
        return {
            slab: len(self._free[slab])
            for slab in pool.listed
            if self._owner[slab] is pool and self._free[slab]
        }

    def free_entries(self, name: str) -> int:
        """How many entries are free in slabs of class `name`."""
        return self._pools[name].free

    def free_in(self, slab: int) -> list[int]:
        """Free entries of a slab that has a class."""
        return list(self._free[slab])

    def held_in(self, slab: int) -> list[int]:
        """Entries of a slab that are held."""
        pool = self._owner[slab]
        if pool is None:
            return []
        count = pool.size.count
        free = set(self._free[slab])
        return [entry for entry in range(slab * count, (slab + 1) * count) if entry not in free]

    def relocate(self, name: str, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Held entries take the place of free ones of their class, holders and tags with them; the sources
        become free. `on_free` is not called: their content is still to be read.
        """
        pool = self._pools[name]
        taken: dict[int, set[int]] = {}
        for source, target in zip(sources, targets, strict=True):
            pool.refs[target] = pool.refs.pop(source)
            if source in self._tags and name == SLOT:
                self._tags[target] = self._tags.pop(source)
            taken.setdefault(target // pool.size.count, set()).add(target)
        for slab, entries in taken.items():
            self._free[slab] = [entry for entry in self._free[slab] if entry not in entries]
        pool.free -= len(targets)
        self._give_back(pool, list(sources))

    # What a slot stands for

    def tag(self, slot: int) -> Tag:
        """What this held slot stands for; (0, 0) when it has never been written."""
        tokens, pending = self._tags[slot]
        return Tag(tokens - pending, pending)

    def pending(self, slots: Iterable[int]) -> list[int]:
        """Of each of these held slots the tokens that are only recorded."""
        tags = self._tags
        return [tags[slot][1] for slot in slots]

    def expect(self, slot: int, tokens: int) -> None:
        """Raises CheckpointError unless the slot stands for exactly `tokens` tokens, with pending ones."""
        self.expect_all((slot,), (tokens,))

    def expect_all(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """`expect` of each of these slots; -1: nothing is to be read."""
        tags = self._tags
        for slot, count in zip(slots, tokens, strict=True):
            if slot < 0 or (slot in tags and tags[slot][0] == count):
                continue
            seen = "is free"
            if slot in tags:
                committed, pending = self.tag(slot)
                seen = f"stands for {committed} tokens ({pending} pending)"
            raise CheckpointError(f"slot {slot} {seen}, but was to be read as the state after {count} tokens")

    def commit(self, slot: int, tokens: int) -> None:
        """Record that the slot now stands for `tokens` tokens, all written. Raises CheckpointError for a free
        slot."""
        if slot not in self._tags:
            raise CheckpointError(f"slot {slot} is free, but was to stand for {tokens} tokens")
        self._tags[slot][:] = tokens, 0

    def advance_all(self, slots: Iterable[int], records: int) -> None:
        """One token more in each of these slots (-1: there is none): only recorded, or, where that would make
        `records` records, written with them. 0 records: always written."""
        tags = self._tags
        for slot in slots:
            if slot < 0:
                continue
            tag = tags[slot]
            tag[0] += 1
            tag[1] = tag[1] + 1 if tag[1] + 1 < records else 0

    def flushed(self, slot: int) -> None:
        """What was pending is written."""
        self._tags[slot][1] = 0

    # Reports

    def slabs(self) -> list[tuple[str | None, int, int]]:
        """Of every slab its class (None: it has none), its entries that are held, and all its entries."""
        report: list[tuple[str | None, int, int]] = []
        for owner, free in zip(self._owner, self._free, strict=True):
            if owner is None:
                report.append((None, 0, 0))
            else:
                report.append((owner.size.name, owner.size.count - len(free), owner.size.count))
        return report

    def stats(self, cached: Mapping[str, int] | None = None) -> dict[str, dict[str, int]]:
        """{"slabs", "pages", "slots"}: {total, used, cached, free}, in entries.

        `total` is what the arena could hold of that class alone, `free` what could be allocated now.
        `cached` of a class, and of "slab", is the number of entries (slabs) that only a cache holds, which it
        passes in; `used` counts the others.
        """
        cached = cached or {}
        empty, only = len(self._empty), cached.get("slab", 0)
        report = {
            "slabs": {
                "total": self.num_slabs,
                "used": self.num_slabs - empty - only,
                "cached": only,
                "free": empty,
            }
        }
        for name, pool in self._pools.items():
            report[name + "s"] = {
                "total": self.num_slabs * pool.size.count,
                "used": len(pool.refs) - cached.get(name, 0),
                "cached": cached.get(name, 0),
                "free": pool.free + empty * pool.size.count,
            }
        return report

    def check(self) -> None:
        """Raises AssertionError when the books do not add up."""
        assert sorted(self._empty) == [s for s, owner in enumerate(self._owner) if owner is None]
        free = {name: 0 for name in self._pools}
        for slab, owner in enumerate(self._owner):
            entries = self._free[slab]
            if owner is None:
                assert not entries, f"slab {slab} has no class but free entries"
                continue
            count = owner.size.count
            assert len(entries) < count, f"slab {slab} is empty but still a slab of {owner.size.name}s"
            assert all(entry // count == slab for entry in entries), f"foreign entries in slab {slab}"
            assert len(set(entries)) == len(entries), f"entry freed twice in slab {slab}"
            assert not any(entry in owner.refs for entry in entries), f"held entry is free in slab {slab}"
            assert not entries or slab in owner.listed, f"slab {slab} has free entries that cannot be found"
            free[owner.size.name] += len(entries)
        for name, pool in self._pools.items():
            slabs = sum(owner is pool for owner in self._owner)
            assert pool.free == free[name], f"{pool.free} free {name}s counted, {free[name]} found"
            assert len(pool.refs) + pool.free == slabs * pool.size.count, f"{name}s lost or made"
            assert all(self._owner[entry // pool.size.count] is pool for entry in pool.refs)
            assert all(holders > 0 for holders in pool.refs.values())
            assert sorted(pool.open) == sorted(pool.listed)
        assert self._tags.keys() == (self._pools[SLOT].refs.keys() if SLOT in self._pools else set())
