"""What becomes of checkpoints that leave the device, and how they come back.

Owns the books of the tiers below the device's and every checkpoint that is on its way between two of them.
Knows tokens and entries; the bytes are moved by the runner (`take`, `launched`) and, for files, by
`denim.cache.disk_tier`.

* Down: a checkpoint that is evicted from the device goes to host memory, with those of its pages that host
  memory lacks, if it is worth more than what has to leave there. Its content is read at the head of the step
  in the making, before anything is written.
* Up: a checkpoint that a waiting request could begin from lands in free entries of the device, beside the
  steps, and becomes an ordinary checkpoint of the device. It stays in the lower tier as well: what grows out
  of it shares its pages there.
* Whatever is on its way holds its entries at both ends, whoever is aborted, evicted or reset meanwhile.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from denim.cache.disk_tier import DiskTier
from denim.cache.landing import Landing, MakeRoom, land
from denim.cache.node import Node, Tokens
from denim.cache.prefix_cache import Lease, PrefixCache
from denim.cache.tier import Tier
from denim.memory.layout import PAGE, SLOT
from denim.memory.transfer import Transfer

Pays = Callable[[int, int, int, str], bool]
"""pays(start, end, bytes, tier): whether bringing so many bytes up from `tier` ("host", "disk") beats
computing tokens start .. end."""

Sources = Callable[[str, Sequence[int]], list[int]]
"""Where the content of entries of a class lies until the step in the making moves it."""


class HostBytes(Protocol):
    """What the books ask of the bytes (`denim.memory.host_memory.HostMemory`)."""

    def arrived(self, key: int) -> bool: ...

    def join(self) -> None: ...


@dataclass(eq=False, slots=True)
class _Leaving:
    """A checkpoint that the step in the making brings to host memory, held there until it is on its way."""

    node: Node
    held: tuple[list[int], int]
    transfer: Transfer


@dataclass(eq=False, slots=True)
class _Coming:
    """A checkpoint that comes from host memory. `start`: the position that was on the device before. `void`:
    it turned out to be wrong, and is not to be used."""

    node: Node
    held: tuple[list[int], int]
    landing: Landing
    lease: Lease
    start: int
    void: bool = False


class LowerTiers:
    """The tiers below `cache`, the device's. Who wants everything brought up may replace `pays`."""

    def __init__(
        self,
        cache: PrefixCache,
        host: Tier,
        host_bytes: HostBytes,
        pays: Pays,
        sources: Sources,
        disk: DiskTier | None = None,
    ) -> None:
        self.cache = cache
        self.host = host
        self.disk = disk
        self._bytes = host_bytes
        self.pays = pays
        self._sources = sources
        self._keys = count()
        self._leaving: list[_Leaving] = []  # of the step in the making, or of one that was not launched yet
        self._planned: dict[int, _Coming] = {}  # likewise
        self._coming: dict[int, _Coming] = {}  # launched
        self._unwritten: OrderedDict[Node, None] = OrderedDict()  # on the host, not in a file; oldest first
        host.backed = disk is not None
        cache.leaving = self._leave

    # Down

    def _leave(self, node: Node) -> None:
        """The device is about to evict the checkpoint at `node`."""
        assert node.checkpoint is not None
        namespace, tokens = self.cache.tree.sequence(node)
        if self.host.at(namespace, tokens) is not None:
            return
        if not self.pays(0, node.end, self._bytes_between(0, node.end), self.host.name):
            return
        landing = self.host.land(namespace, tokens, node.checkpoint.kind, like=node)
        if landing is None:
            return
        first = landing.first
        pages = self.cache.tree.pages_to(node)[first:]
        slot, pending = node.checkpoint.slot, 0
        if slot >= 0:
            pending = self.cache.arena.tag(slot).pending
            self.cache.arena.flushed(slot)
            slot = self._sources(SLOT, [slot])[0]
        stands = self.host.settle(landing)
        assert stands is not None, "it stood there already"
        held = self.host.hold(stands, first)
        transfer = Transfer(next(self._keys), slot, self._sources(PAGE, pages), held[1], held[0], pending)
        self._leaving.append(_Leaving(stands, held, transfer))

    # Up

    def is_coming(self, namespace: Hashable, tokens: Tokens, position: int) -> bool:
        """Whether a checkpoint for a request of `tokens`, deeper than `position`, is on its way."""
        landings = [coming.landing for group in (self._planned, self._coming) for coming in group.values()]
        if self.disk is not None:
            landings += self.disk.landings()
        return any(
            position < len(landing.tokens) < len(tokens)
            and landing.namespace == namespace
            and tokens[: len(landing.tokens)] == landing.tokens
            for landing in landings
        )

    def bring(self, namespace: Hashable, tokens: Tokens, position: int, make_room: MakeRoom) -> bool:
        """Begin to bring up what a request of `tokens` could use beyond `position`, which the device has;
        False where there is nothing that pays, or no room for it."""
        node = self.host.find(namespace, tokens)
        if self.disk is not None:
            file = self.disk.find(namespace, tokens)
            near = max(position, node.end if node is not None else 0)
            pays = file is not None and self._is_worth(near, file.end, self.disk.name)
            if file is not None and pays and self.disk.read(namespace, tokens[: file.end], file):
                return True
        if node is None or not self._is_worth(position, node.end, self.host.name):
            return False
        assert node.checkpoint is not None
        kind = node.checkpoint.kind
        held = self.host.hold(node, 0)  # before room is made: what leaves for it wants room here
        landing = land(self.cache.tree, self.cache.arena, namespace, tokens[: node.end], kind, make_room)
        if landing is None:
            self.host.let_go(node, *held)
            return False
        self._planned[next(self._keys)] = _Coming(node, held, landing, self.cache.lease(), position)
        return True

    def reach(self, namespace: Hashable, tokens: Tokens) -> int:
        """The position that a request of `tokens` could begin from if all lower tiers were at hand."""
        nodes = [self.host.find(namespace, tokens)]
        if self.disk is not None:
            nodes.append(self.disk.find(namespace, tokens))
        return max((node.end for node in nodes if node is not None), default=0)

    def _is_worth(self, start: int, end: int, tier: str) -> bool:
        return end > start and self.pays(start, end, self._bytes_between(start, end), tier)

    def _bytes_between(self, start: int, end: int) -> int:
        """Bytes that come up for a checkpoint at `end` where the pages before `start` are there."""
        layout = self.host.arena.layout
        need = {PAGE: -(-end // layout.page_size) - start // layout.page_size, SLOT: 1}
        return sum(size.entry_bytes * need[size.name] for size in layout.classes)

    # A step

    def take(self) -> tuple[list[Transfer], list[Transfer]]:
        """What the step in the making brings out and in; to be followed by `launched` or `reset`."""
        loads = [
            Transfer(
                key,
                coming.landing.slot,
                coming.landing.new_pages,
                coming.held[1],
                coming.held[0][coming.landing.first :],
            )
            for key, coming in self._planned.items()
        ]
        return [leaving.transfer for leaving in self._leaving], loads

    def launched(self) -> None:
        """The step that was made is on its way."""
        for leaving in self._leaving:
            self.host.let_go(leaving.node, *leaving.held)
            if self.disk is not None:
                self._unwritten[leaving.node] = None
        self._leaving.clear()
        self._coming |= self._planned
        self._planned.clear()

    def arrive(self) -> None:
        """Note what has arrived since the last call, and begin what follows from it."""
        for key in [key for key in self._coming if self._bytes.arrived(key)]:
            self._land(self._coming.pop(key))
        if self.disk is not None:
            self.disk.arrive()
            while self._unwritten and self.disk.may_write:
                node, _ = self._unwritten.popitem(last=False)
                if node.checkpoint is not None:
                    self.disk.write(*self.host.tree.sequence(node), node)

    def write_out(self) -> None:
        """Wait until everything in host memory is in files, as far as they have room for it."""
        if self.disk is None:
            return
        self.arrive()
        while self._unwritten:
            self.disk.finish()
            self.arrive()
        self.disk.finish()

    def push_down(self) -> None:
        """Bring what lies in host memory to files, as far as they have room for it, and out of host memory,
        but for what is in use there. Without files it stays."""
        if self.disk is None:
            return
        self.write_out()
        for node in [node for node in self.host.nodes() if not node.users]:
            self.host.drop(node)

    @property
    def awaited(self) -> bool:
        """Whether anything is on its way up."""
        reading = self.disk is not None and bool(self.disk.landings())
        return bool(self._planned or self._coming) or reading

    @property
    def unsettled(self) -> bool:
        """Whether anything is on its way, up or into files, or waits to be written."""
        return self.awaited or bool(self._unwritten) or (self.disk is not None and not self.disk.may_write)

    def _land(self, coming: _Coming) -> None:
        landing = coming.landing
        end, taken = len(landing.tokens), False
        if not coming.void:
            if landing.slot >= 0:
                self.cache.arena.commit(landing.slot, end)
            self.cache.returned(landing.namespace, landing.tokens)
            space: Any = landing.namespace
            node = self.cache.save(
                space, landing.tokens, landing.pages, landing.slot, landing.kind, coming.lease
            )
            taken = node is not None
        if taken:
            self.host.order.used(coming.node)
            self.host.counts["loaded"] += 1
            self.host.counts["loaded_tokens"] += end - coming.start
        landing.give_up(self.cache.arena, slot_taken=taken)
        self.host.let_go(coming.node, *coming.held)

    # Wrong, or unwanted

    def discard(self, namespace: Hashable, tokens: Tokens) -> None:
        """The checkpoint after just these tokens is wrong, wherever it lies."""
        for group in (self._planned, self._coming):
            for coming in group.values():
                coming.void = coming.void or coming.landing.is_after(namespace, tokens)
        node = self.host.at(namespace, tokens)
        if node is not None:
            self.host.drop(node)
        if self.disk is not None:
            self.disk.discard(namespace, tokens)

    def reset(self, files: bool) -> None:
        """Forget what lies in host memory, and with `files` what lies on disk. Whatever a step that was made
        and not launched was to move stays where it is."""
        for leaving in self._leaving:
            self.host.let_go(leaving.node, *leaving.held)
        self._leaving.clear()
        if self._planned:
            self._bytes.join()  # the step may have begun to move them before it failed
        for coming in self._planned.values():
            coming.landing.give_up(self.cache.arena)
            self.host.let_go(coming.node, *coming.held)
        self._planned.clear()
        self._unwritten.clear()
        self.host.clear()
        if self.disk is not None:
            self.disk.reset(files)

    # Reports

    def held(self) -> dict[str, Counter[int]]:
        """{"page", "slot"}: entry of the device -> number of times that what comes in holds it."""
        counts: dict[str, Counter[int]] = {PAGE: Counter(), SLOT: Counter()}
        for coming in (*self._planned.values(), *self._coming.values()):
            for name, entries in coming.landing.held().items():
                counts[name].update(entries)
        return counts

    def taken(self) -> Counter[str]:
        """Entries of the device, by class, that only what comes in holds."""
        coming = (*self._planned.values(), *self._coming.values())
        pages = sum(len(one.landing.new_pages) for one in coming)
        return +Counter({PAGE: pages, SLOT: sum(one.landing.slot >= 0 for one in coming)})

    def moved(self, name: str, targets: Mapping[int, int]) -> int:
        """A `Holder`: the device's entries have new ids, old -> new."""
        coming = (*self._planned.values(), *self._coming.values())
        return sum(one.landing.moved(name, targets) for one in coming)

    def stats(self) -> dict[str, dict[str, int]]:
        """{"host", "disk"}: see `Tier.stats`; a tier that is not there is left out."""
        tiers = {self.host.name: self.host.stats()}
        return tiers if self.disk is None else tiers | {self.disk.name: self.disk.stats()}

    def check(self) -> None:
        """Raises AssertionError when an invariant of a tier is broken."""
        self.host.check()
        if self.disk is not None:
            self.disk.check()
