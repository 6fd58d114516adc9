"""The tier of files: which checkpoints lie there, and what is being written and read.

Owns the books and the jobs on their way; the files' own bytes and places are `denim.cache.file_space`'s.
Everything passes through host memory: what has gone there is written behind, and what a request wants is read
to there first. Books change in the engine's thread, when a job has ended.

* A checkpoint stands once both its files are renamed, and not before.
* A file that turns out to be damaged takes along what stands on its pages. Nobody fails for it: what was
  wanted is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from denim.cache.file_job import FileJob, read_checkpoint, write_checkpoint
from denim.cache.file_space import FileSpace
from denim.cache.landing import Landing
from denim.cache.node import Node, Tokens
from denim.cache.prefix_cache import Namespace
from denim.cache.tier import Tier
from denim.memory.layout import PAGE, SLOT
from denim.memory.prefix_files import PagePlace, PrefixFiles, StoredCheckpoint

log = logging.getLogger("denim")

MOST_TOLD = 3
"""Files that are named in the log when they are passed over."""

OpenTier = Callable[[Callable[[list[int]], None], Callable[[Mapping[str, int]], bool]], Tier]
"""An empty tier, given `on_free` and `has_room`."""


class HostPieces(Protocol):
    """What jobs need of host memory (`denim.memory.host_memory.HostMemory`)."""

    def slot_buffers(self, entry: int) -> list[memoryview]: ...

    def page_buffers(self, entry: int) -> list[memoryview]: ...

    def mark(self) -> Any: ...


@dataclass(eq=False, slots=True)
class _Writing:
    """`node` is that of host memory; `number` that of the two files, whose bytes the job says; `places` are
    those of the landing's new pages."""

    node: Node
    held: tuple[list[int], int]
    landing: Landing
    number: int
    places: list[PagePlace]
    epoch: int
    job: FileJob


@dataclass(eq=False, slots=True)
class _Reading:
    """`node` is that of the files; `landing` is in host memory."""

    node: Node
    held: tuple[list[int], int]
    landing: Landing
    epoch: int
    job: FileJob
    void: bool = False  # the checkpoint has left the tier meanwhile


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
        self._host = host
        self._pieces = pieces
        self._threads = threads
        self._space = FileSpace(files, limit_bytes, threads)
        self._writing: list[_Writing] = []
        self._reading: list[_Reading] = []
        self._epoch = 0
        self._warned = False
        self._tier = open_tier(self._space.free_pages, self._has_room)
        self._tier.on_drop = self._dropped
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
        busy = any(writing.landing.is_after(namespace, tokens) for writing in self._writing)
        if busy or not _has_a_name(namespace) or self._tier.at(namespace, tokens) is not None:
            return
        assert node.checkpoint is not None
        self._space.expect(len(self._host.tree.pages_to(node)), len(tokens))
        landing = self._tier.land(namespace, tokens, node.checkpoint.kind, like=node)
        if landing is None:
            return
        first = landing.first
        number = self._space.next_number()
        held = self._host.hold(node, first)
        new = [PagePlace(number, row) for row in range(len(landing.new_pages))]
        places = self._space.places_of(landing.pages[:first]) + new
        space: Any = namespace
        checkpoint = StoredCheckpoint(number, tuple(space), tokens, landing.kind, places, 0.0)
        pages = [self._pieces.page_buffers(entry) for entry in held[0]]
        state = self._pieces.slot_buffers(held[1]) if held[1] >= 0 else []
        job = self._job(partial(write_checkpoint, self._files, checkpoint, pages, state))
        self._writing.append(_Writing(node, held, landing, number, new, self._epoch, job))

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
        places = self._space.places_of(held[0][landing.first :])
        pages = [self._pieces.page_buffers(entry) for entry in landing.new_pages]
        state = self._pieces.slot_buffers(landing.slot) if landing.slot >= 0 else []
        number = self._space.number_of(node)
        job = self._job(partial(read_checkpoint, self._files, number, places, pages, state))
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

    def finish(self) -> None:
        """Wait for all jobs."""
        for job in [*(w.job for w in self._writing), *(r.job for r in self._reading)]:
            job.finish()
        self.arrive()
        self._space.finish()

    def _written(self, writing: _Writing) -> None:
        landing, number = writing.landing, writing.number
        self._host.let_go(writing.node, *writing.held)
        outcome = writing.job.finish()
        error = outcome.exception()
        if error is not None or writing.epoch != self._epoch:
            self._space.remove(number, pages=True, state=True)
            landing.give_up(self._tier.arena)
            if error is not None:
                self._tier.counts["failed"] += 1
                self._warn(f"a checkpoint could not be written: {error}")
            return
        pages, state = outcome.result()
        if pages:
            self._space.add_pages(number, dict(zip(landing.new_pages, writing.places, strict=True)), pages)
        node = self._tier.settle(landing)
        if node is None:
            self._space.remove(number, state=True)
        else:
            self._space.add_state(node, number, state)

    def _read(self, reading: _Reading) -> None:
        landing = reading.landing
        error = reading.job.finish().exception()
        stands = reading.epoch == self._epoch and not reading.void
        if error is None and stands:
            self._tier.order.used(reading.node)
            self._tier.counts["loaded"] += 1
            self._tier.counts["loaded_tokens"] += len(landing.tokens)
            node = self._host.settle(landing)
            if node is not None:
                self._host.order.returned(node)
        else:
            landing.give_up(self._host.arena)
        self._tier.let_go(reading.node, *reading.held)
        if error is not None and stands:  # else its file may be gone because it was to go
            self._tier.counts["failed"] += 1
            self._warn(f"a checkpoint could not be read, and is computed instead: {error}")
            self._drop_with(reading.node)

    def _drop_with(self, node: Node) -> None:
        """Drop the checkpoint at `node`, and all that stand on pages of its files: any of them may be the
        damaged one."""
        files = self._files_under(node)
        for other in list(self._tier.nodes()):
            if other is node or self._files_under(other) & files:
                self._tier.drop(other)

    def _files_under(self, node: Node) -> set[int]:
        return {place.file for place in self._space.places_of(self._tier.tree.pages_to(node))}

    # Wrong, or unwanted

    def discard(self, namespace: Hashable, tokens: Tokens) -> None:
        """The checkpoint after just these tokens is wrong."""
        if any(writing.landing.is_after(namespace, tokens) for writing in self._writing):
            self.finish()
        node = self._tier.at(namespace, tokens)
        if node is not None:
            self._tier.drop(node)

    def _dropped(self, node: Node) -> None:
        """The checkpoint at `node` leaves, and its file with it, also while it is read."""
        for reading in self._reading:
            reading.void = reading.void or reading.node is node
        self._space.drop_state(node)

    def reset(self, files: bool) -> None:
        """Nothing of what is on its way is to be used; with `files`, nothing of what is there either."""
        self._epoch += 1
        if files:
            for node in self._space.nodes():
                self._space.drop_state(node)
            self._tier.clear()

    # Files and room

    def _open(self) -> None:
        """Know what lies there. What names pages that are not there is removed, as pages are that nobody
        names; what exceeds the limit goes as usual."""
        checkpoints, rows, passed = self._files.scan()
        arena = self._tier.arena
        pages: dict[PagePlace, int] = {}
        self._space.begin_after([*rows, *(checkpoint.number for checkpoint in checkpoints)])
        for number in rows:
            self._space.add_pages(number, {}, self._files.size_of(number)[0])
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
                self._space.add_pages(place.file, {page: place}, 0)
            ids = [pages[place] for place in checkpoint.pages]
            if ids:
                arena.share(PAGE, ids)
            (slot,) = arena.alloc_freely(SLOT, 1) if arena.layout.has(SLOT) else [-1]
            landing = Landing(namespace, checkpoint.tokens, checkpoint.kind, ids, 0, slot)
            node = self._tier.settle(landing)
            assert node is not None
            self._space.add_state(node, checkpoint.number, size)
            if node.wait is not None:  # as old as it is; but that nobody came without an engine says nothing
                node.wait.since -= checkpoint.age
                node.wait.counted = checkpoint.age
        for page in pages.values():
            arena.release(PAGE, [page])
        self._space.remove_unneeded(rows)
        while not self._space.has_room(0) and (victim := self._tier.order.victim(None)) is not None:
            self._tier.drop(victim)
        for reason in passed[:MOST_TOLD]:
            log.warning("disk_cache: a file is passed over: %s", reason)
        if len(passed) > MOST_TOLD:
            log.warning("disk_cache: %d more files are passed over", len(passed) - MOST_TOLD)
        self._tier.counts.clear()

    def _has_room(self, need: Mapping[str, int]) -> bool:
        layout = self._tier.arena.layout
        new = sum(size.entry_bytes * need.get(size.name, 0) for size in layout.classes)
        return self._space.has_room(new)

    def _job(self, work: Callable[[], Any]) -> FileJob:
        return FileJob(self._threads, self._pieces.mark(), work)

    def _warn(self, message: str) -> None:
        """Once: a disk that is full or broken would fill the log."""
        if not self._warned:
            log.warning("disk_cache: %s; further failures are only counted", message)
            self._warned = True

    # Reports

    def stats(self) -> dict[str, int]:
        """See `Tier.stats`; bytes are those of whole files."""
        return self._tier.stats() | {
            "used_bytes": self._space.used_bytes,
            "total_bytes": self._space.limit_bytes,
        }

    def check(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        self._tier.check()
        self._space.check(self._tier.nodes())


def _has_a_name(namespace: Hashable) -> bool:
    """Whether files can say which namespace it is."""
    return isinstance(namespace, Namespace) and isinstance(namespace.adapter, str | int | None)
