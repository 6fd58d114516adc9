"""The tier of files: which checkpoints lie there, and what is being written and read.

Owns the books of the files and the jobs of its threads. Everything passes through host memory: what has gone
there is written behind, and what a request wants is read to there first. The threads see buffers and files
alone, never the device: a call to it beside a graph that is being captured would spoil the capture. Books
change in the engine's thread, when a job has ended.

* A checkpoint stands once both its files are renamed, and not before.
* What is bounded is the bytes of whole files: a file of pages goes with the last page that anybody needs.
* A file that turns out to be damaged takes along what stands on its pages. Nobody fails for it: what was
  wanted is computed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from denim.cache.landing import Landing
from denim.cache.node import Node, Tokens
from denim.cache.prefix_cache import Namespace
from denim.cache.tier import Tier
from denim.memory.layout import PAGE, SLOT
from denim.memory.prefix_files import PagePlace, PrefixFiles, StoredCheckpoint

log = logging.getLogger("denim")

HEADER_BYTES = 4096
"""Taken for the header of a file before it is written; that of a pages file has a checksum of up to 12
characters for each page more, a state file the tokens and where the pages lie."""

PER_PAGE, PER_TOKEN = 12, 4

OpenTier = Callable[[Callable[[list[int]], None], Callable[[Mapping[str, int]], bool]], Tier]
"""An empty tier, given `on_free` and `has_room`."""


class HostPieces(Protocol):
    """What jobs need of host memory (`denim.memory.host_memory.HostMemory`)."""

    def slot_buffers(self, entry: int) -> list[memoryview]: ...

    def page_buffers(self, entry: int) -> list[memoryview]: ...

    def mark(self) -> Any: ...


class _Job:
    """Work for a thread that begins once the device has done with the buffers (`ready`; None: at once)."""

    def __init__(self, threads: Executor, ready: Any, work: Callable[[], Any]) -> None:
        self._threads = threads
        self._ready = ready
        self._work = work
        self._future: Future[Any] | None = None
        self.done()

    def done(self) -> bool:
        """Whether it has ended; begins it if it can begin."""
        if self._future is None and (self._ready is None or self._ready.query()):
            self._future = self._threads.submit(self._work)
        return self._future is not None and self._future.done()

    def finish(self) -> Future[Any]:
        """Wait until it has ended."""
        if self._future is None:
            self._ready.synchronize()
            self.done()
        assert self._future is not None
        wait([self._future])
        return self._future


@dataclass(eq=False, slots=True)
class _Writing:
    """`node` is that of host memory; `number` that of the two files, whose bytes the job says."""

    node: Node
    held: tuple[list[int], int]
    landing: Landing
    number: int
    places: list[PagePlace]
    epoch: int
    job: _Job


@dataclass(eq=False, slots=True)
class _Reading:
    """`node` is that of the files; `landing` is in host memory."""

    node: Node
    held: tuple[list[int], int]
    landing: Landing
    epoch: int
    job: _Job
    void: bool = False


class DiskTier:
    """`files` in at most `limit_bytes`; what lies there already is known from the start. Raises nothing for
    files that cannot be used: they are named in the log and passed over."""

    def __init__(
        self,
        files: PrefixFiles,
        limit_bytes: int,
        open_tier: OpenTier,
        host: Tier,
        pieces: HostPieces,
        threads: Executor,
    ) -> None:
        self._files = files
        self._limit = limit_bytes
        self._host = host
        self._pieces = pieces
        self._threads = threads
        self._writing: list[_Writing] = []
        self._reading: list[_Reading] = []
        self._removing: list[Future[None]] = []
        self._epoch = 0
        self._number = 0  # the highest of any file so far
        self._used = 0  # bytes of whole files
        self._overhead = 0  # of headers and tokens of what is about to be written
        self._places: dict[int, PagePlace] = {}  # page -> where it lies
        self._live: Counter[int] = Counter()  # file of pages -> pages that somebody needs
        self._page_bytes: dict[int, int] = {}  # file of pages -> bytes
        self._states: dict[Node, tuple[int, int]] = {}  # checkpoint -> number and bytes of its state file
        self._warned = False
        self._tier = open_tier(self._freed, self._has_room)
        self._tier.on_drop = self._drop_state
        self.name = self._tier.name
        self._open()

    # Lookups

    def find(self, namespace: Hashable, tokens: Tokens) -> Node | None:
        """See `Tier.find`."""
        return self._tier.find(namespace, tokens)

    def landings(self) -> list[Landing]:
        """What is being read."""
        return [reading.landing for reading in self._reading]

    @property
    def may_write(self) -> bool:
        """One after the other: what a state file says of pages must be true of all that stands before it."""
        return not self._writing

    # Out

    def write(self, namespace: Hashable, tokens: Tokens, node: Node) -> None:
        """Begin to write the checkpoint of host memory at `node`, unless it is there, or room is made only by
        what is worth more."""
        busy = any(w.landing.namespace == namespace and w.landing.tokens == tokens for w in self._writing)
        if busy or not _has_a_name(namespace) or self._tier.at(namespace, tokens) is not None:
            return
        assert node.checkpoint is not None
        most_pages = len(self._host.tree.pages_to(node))
        self._overhead = 2 * HEADER_BYTES + (2 * PER_PAGE) * most_pages + PER_TOKEN * len(tokens)
        landing = self._tier.land(namespace, tokens, node.checkpoint.kind, like=node)
        if landing is None:
            return
        first = landing.first
        self._number += 1
        held = self._host.hold(node, first)
        new = [PagePlace(self._number, row) for row in range(len(landing.new_pages))]
        places = [self._places[page] for page in landing.pages[:first]] + new
        space: Any = namespace
        checkpoint = StoredCheckpoint(self._number, tuple(space), tokens, landing.kind, places, 0.0)
        pages = [self._pieces.page_buffers(entry) for entry in held[0]]
        state = self._pieces.slot_buffers(held[1]) if held[1] >= 0 else []
        job = self._job(partial(_write, self._files, checkpoint, pages, state))
        self._writing.append(_Writing(node, held, landing, self._number, places, self._epoch, job))

    # In

    def read(self, namespace: Hashable, tokens: Tokens, node: Node) -> bool:
        """Begin to read the checkpoint at `node`, after `tokens`, to host memory; False where that has no
        room for it."""
        assert node.checkpoint is not None
        held = self._tier.hold(node, 0)
        landing = self._host.land(namespace, tokens, node.checkpoint.kind, like=node)
        if landing is None:
            self._tier.let_go(node, *held)
            return False
        places = [self._places[page] for page in held[0][landing.first :]]
        pages = [self._pieces.page_buffers(entry) for entry in landing.new_pages]
        state = self._pieces.slot_buffers(landing.slot) if landing.slot >= 0 else []
        number = self._states[node][0]
        job = self._job(partial(_read, self._files, number, places, pages, state))
        self._reading.append(_Reading(node, held, landing, self._epoch, job))
        return True

    # Jobs that have ended

    def arrive(self) -> None:
        """Note what has been written and read since the last call."""
        for writing in [w for w in self._writing if w.job.done()]:
            self._writing.remove(writing)
            self._written(writing)
        for reading in [r for r in self._reading if r.job.done()]:
            self._reading.remove(reading)
            self._read(reading)
        self._removing = [job for job in self._removing if not job.done()]

    def finish(self) -> None:
        """Wait for all jobs."""
        for job in [*(w.job for w in self._writing), *(r.job for r in self._reading)]:
            job.finish()
        self.arrive()
        wait(self._removing)  # of what failed, among others

    def _written(self, writing: _Writing) -> None:
        landing, number = writing.landing, writing.number
        self._host.let_go(writing.node, *writing.held)
        outcome = writing.job.finish()
        error = outcome.exception()
        if error is not None or writing.epoch != self._epoch:
            self._remove(number, pages=True, state=True)
            landing.give_up(self._tier.arena)
            if error is not None:
                self._tier.counts["failed"] += 1
                self._warn(f"a checkpoint could not be written: {error}")
            return
        pages, state = outcome.result()
        for page, place in zip(landing.new_pages, writing.places[landing.first :], strict=True):
            self._places[page] = place
        if pages:
            self._live[number], self._page_bytes[number] = len(landing.new_pages), pages
        self._used += pages + state
        node = self._tier.settle(landing)
        if node is None:
            self._used -= state
            self._remove(number, state=True)
        else:
            self._states[node] = (number, state)

    def _read(self, reading: _Reading) -> None:
        landing = reading.landing
        error = reading.job.finish().exception()
        if error is None and reading.epoch == self._epoch and not reading.void:
            self._tier.order.used(reading.node)
            self._tier.counts["loaded"] += 1
            self._tier.counts["loaded_tokens"] += len(landing.tokens)
            node = self._host.settle(landing)
            if node is not None:
                self._host.order.returned(node)
        else:
            landing.give_up(self._host.arena)
        self._tier.let_go(reading.node, *reading.held)
        if error is not None:
            self._tier.counts["failed"] += 1
            self._warn(f"a checkpoint could not be read, and is computed instead: {error}")
            self._drop_with(reading.node)

    def _drop_with(self, node: Node) -> None:
        """Drop the checkpoint at `node`, and all that stand on pages of its files: any of them may be the
        damaged one."""
        files = {self._places[page].file for page in self._tier.tree.pages_to(node)}
        for other in list(self._tier.nodes()):
            on = {self._places[page].file for page in self._tier.tree.pages_to(other)}
            if other is node or on & files:
                self._tier.drop(other)

    # Wrong, or unwanted

    def discard(self, namespace: Hashable, tokens: Tokens) -> None:
        """The checkpoint after just these tokens is wrong."""
        for reading in self._reading:
            alike = reading.landing.namespace == namespace and reading.landing.tokens == tokens
            reading.void = reading.void or alike
        if any(w.landing.namespace == namespace and w.landing.tokens == tokens for w in self._writing):
            self.finish()
        node = self._tier.at(namespace, tokens)
        if node is not None:
            self._tier.drop(node)

    def reset(self, files: bool) -> None:
        """Nothing of what is on its way is to be used; with `files`, nothing of what is there either."""
        self._epoch += 1
        if files:
            for node in list(self._states):
                self._drop_state(node)
            self._tier.clear()

    # Files and room

    def _open(self) -> None:
        """Know what lies there. What names pages that are not there is removed, as pages are that nobody
        names; what exceeds the limit goes as usual."""
        checkpoints, rows, passed = self._files.scan()
        arena, tree = self._tier.arena, self._tier.tree
        pages: dict[PagePlace, int] = {}
        self._number = max([0, *rows, *(checkpoint.number for checkpoint in checkpoints)])
        for number in rows:
            self._page_bytes[number] = self._files.size_of(number)[0]
            self._used += self._page_bytes[number]
        for checkpoint in checkpoints:
            size = self._files.size_of(checkpoint.number)[1]
            missing = [place for place in checkpoint.pages if place.row >= rows.get(place.file, 0)]
            namespace = Namespace(*checkpoint.namespace)
            if missing or self._tier.at(namespace, checkpoint.tokens) is not None:
                passed.append(f"{checkpoint.number:012d}: it lacks pages, or stands there twice")
                self._files.remove_state(checkpoint.number)
                continue
            new = [place for place in checkpoint.pages if place not in pages]
            for place, page in zip(new, arena.alloc_freely(PAGE, len(new)), strict=True):
                pages[place] = page
                self._places[page] = place
                self._live[place.file] += 1
            ids = [pages[place] for place in checkpoint.pages]
            if ids:
                arena.share(PAGE, ids)
            (slot,) = arena.alloc_freely(SLOT, 1) if arena.layout.has(SLOT) else [-1]
            landing = Landing(namespace, checkpoint.tokens, checkpoint.kind, ids, 0, slot)
            self._used += size
            node = self._tier.settle(landing)
            assert node is not None
            self._states[node] = (checkpoint.number, size)
            if node.wait is not None:  # as old as it is; but that nobody came without an engine says nothing
                node.wait.since -= checkpoint.age
                node.wait.counted = checkpoint.age
        for page in pages.values():
            arena.release(PAGE, [page])
        for number in [number for number in rows if not self._live[number]]:
            self._remove_pages(number)
        self._overhead = 0
        while not self._has_room({}) and (victim := self._tier.order.victim(None)) is not None:
            self._tier.drop(victim)
        for reason in passed[:3]:
            log.warning("disk_cache: a file is passed over: %s", reason)
        if len(passed) > 3:
            log.warning("disk_cache: %d more files are passed over", len(passed) - 3)
        self._tier.counts.clear()
        assert tree.checkpoints == len(self._states)

    def _has_room(self, need: Mapping[str, int]) -> bool:
        layout = self._tier.arena.layout
        new = sum(size.entry_bytes * need.get(size.name, 0) for size in layout.classes)
        return self._used + new + self._overhead <= self._limit

    def _freed(self, ids: list[int]) -> None:
        for page in ids:
            place = self._places.pop(page, None)
            if place is not None:
                self._live[place.file] -= 1
                if not self._live[place.file]:
                    self._remove_pages(place.file)

    def _drop_state(self, node: Node) -> None:
        number, size = self._states.pop(node)
        self._used -= size
        self._remove(number, state=True)

    def _remove_pages(self, number: int) -> None:
        del self._live[number]
        self._used -= self._page_bytes.pop(number)
        self._remove(number, pages=True)

    def _job(self, work: Callable[[], Any]) -> _Job:
        return _Job(self._threads, self._pieces.mark(), work)

    def _remove(self, number: int, pages: bool = False, state: bool = False) -> None:
        self._removing.append(self._threads.submit(_remove, self._files, number, pages, state))

    def _warn(self, message: str) -> None:
        """Once: a disk that is full or broken would fill the log."""
        if not self._warned:
            log.warning("disk_cache: %s; further failures are only counted", message)
            self._warned = True

    # Reports

    def stats(self) -> dict[str, int]:
        """See `Tier.stats`; bytes are those of whole files."""
        return self._tier.stats() | {"used_bytes": self._used, "total_bytes": self._limit}

    def check(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        self._tier.check()
        assert set(self._states) == set(self._tier.nodes())
        assert Counter(place.file for place in self._places.values()) == +self._live
        sizes = sum(self._page_bytes.values()) + sum(size for _, size in self._states.values())
        assert sizes == self._used and self._page_bytes.keys() == self._live.keys()


def _has_a_name(namespace: Hashable) -> bool:
    """Whether files can say which namespace it is."""
    return isinstance(namespace, Namespace) and isinstance(namespace.adapter, str | int | None)


def _write(
    files: PrefixFiles,
    checkpoint: StoredCheckpoint,
    pages: Sequence[Sequence[memoryview]],
    state: Sequence[memoryview],
) -> tuple[int, int]:
    """Bytes of the two files; 0 where there are no new pages."""
    page_bytes = files.write_pages(checkpoint.number, pages) if pages else 0
    return page_bytes, files.write_state(checkpoint, state)


def _read(
    files: PrefixFiles,
    number: int,
    places: Sequence[PagePlace],
    pages: Sequence[Sequence[memoryview]],
    state: Sequence[memoryview],
) -> None:
    files.read_state(number, state)
    files.read_pages(places, pages)


def _remove(files: PrefixFiles, number: int, pages: bool, state: bool) -> None:
    if state:
        files.remove_state(number)
    if pages:
        files.remove_pages(number)
