"""Work on files for a thread, which begins once the device has done with the buffers.

Owns the waiting and the two kinds of work. The threads see buffers and files alone, never the device: a call
to it beside a graph that is being captured would spoil the capture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from typing import Any

from denim.memory.prefix_files import PagePlace, PrefixFiles, StoredCheckpoint

Buffers = Sequence[memoryview]


class FileJob:
    """`ready`: says by `query()` whether the device has done with the buffers; None: it has."""

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


def write_checkpoint(
    files: PrefixFiles, checkpoint: StoredCheckpoint, pages: Sequence[Buffers], state: Buffers
) -> tuple[int, int]:
    """Bytes of the two files; 0 where there are no new pages. Raises OSError."""
    page_bytes = files.write_pages(checkpoint.number, pages) if pages else 0
    return page_bytes, files.write_state(checkpoint, state)


def read_checkpoint(
    files: PrefixFiles,
    number: int,
    places: Sequence[PagePlace],
    pages: Sequence[Buffers],
    state: Buffers,
) -> None:
    """Fill `pages` from where they lie, and `state` from its file. Raises CheckpointError."""
    files.read_state(number, state)
    files.read_pages(places, pages)
