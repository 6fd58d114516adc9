"""Which files the tier of files has, what of them is needed, and how many bytes they take.

Owns where each page lies, which file holds which checkpoint's state, and the bound on whole files: a file of
pages goes with the last page that anybody needs. Removes files by a thread; what they mean for a request,
`denim.cache.disk_tier` knows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, wait

from denim.cache.node import Node
from denim.memory.prefix_files import PagePlace, PrefixFiles

HEADER_BYTES = 4096
"""Taken for the header of a file before it is written; that of a pages file has a checksum of up to 12
characters for each page more, a state file the tokens and where the pages lie."""

PER_PAGE, PER_TOKEN = 12, 4


class FileSpace:
    """At most `limit_bytes` of `files`. Pages are named by their entries in the tier's arena."""

    def __init__(self, files: PrefixFiles, limit_bytes: int, threads: Executor) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0  # of whole files
        self._files = files
        self._threads = threads
        self._number = 0  # the highest of any file so far
        self._overhead = 0  # of headers and tokens of what is about to be written
        self._places: dict[int, PagePlace] = {}  # page -> where it lies
        self._needed: Counter[int] = Counter()  # file of pages -> pages that somebody needs
        self._pages: dict[int, int] = {}  # file of pages -> bytes
        self._states: dict[Node, tuple[int, int]] = {}  # checkpoint -> number and bytes of its state file
        self._removing: list[Future[None]] = []

    # What is where

    def places_of(self, pages: Iterable[int]) -> list[PagePlace]:
        return [self._places[page] for page in pages]

    def number_of(self, node: Node) -> int:
        """The number of the state file of the checkpoint at `node`."""
        return self._states[node][0]

    def nodes(self) -> list[Node]:
        """Those with a state file."""
        return list(self._states)

    # Room

    def next_number(self) -> int:
        """A number that no file has had."""
        self._number += 1
        return self._number

    def begin_after(self, numbers: Iterable[int]) -> None:
        """Files of these numbers are there."""
        self._number = max([self._number, *numbers])

    def expect(self, pages: int, tokens: int) -> None:
        """What is asked room for next has so many pages and tokens at most."""
        self._overhead = 2 * HEADER_BYTES + 2 * PER_PAGE * pages + PER_TOKEN * tokens

    def has_room(self, nbytes: int) -> bool:
        return self.used_bytes + nbytes + self._overhead <= self.limit_bytes

    # Files come and go

    def add_pages(self, number: int, places: Mapping[int, PagePlace], nbytes: int) -> None:
        """A file of pages is there; `places` of those that are needed now, more may follow."""
        if number not in self._pages:
            self._pages[number] = nbytes
            self.used_bytes += nbytes
        self._places.update(places)
        self._needed[number] += len(places)

    def add_state(self, node: Node, number: int, nbytes: int) -> None:
        """The state file of the checkpoint at `node` is there."""
        self._states[node] = (number, nbytes)
        self.used_bytes += nbytes

    def free_pages(self, pages: Sequence[int]) -> None:
        """Nobody needs these pages any more (`ByteArena`'s `on_free`); some may never have been written."""
        places = [self._places.pop(page) for page in pages if page in self._places]
        for place in places:
            self._needed[place.file] -= 1
        self.remove_unneeded({place.file for place in places})

    def remove_unneeded(self, numbers: Iterable[int]) -> None:
        """Remove those of these files of pages of which no page is needed."""
        for number in [number for number in numbers if not self._needed[number]]:
            self._needed.pop(number, None)
            self.used_bytes -= self._pages.pop(number)
            self.remove(number, pages=True)

    def drop_state(self, node: Node) -> None:
        number, size = self._states.pop(node)
        self.used_bytes -= size
        self.remove(number, state=True)

    def remove(self, number: int, pages: bool = False, state: bool = False) -> None:
        """Begin to remove files, which count for nothing already."""
        self._removing = [job for job in self._removing if not job.done()]
        self._removing.append(self._threads.submit(_remove, self._files, number, pages, state))

    def finish(self) -> None:
        """Wait until all that was to be removed is."""
        wait(self._removing)

    def check(self, nodes: Iterable[Node]) -> None:
        """Raises AssertionError unless just these checkpoints have files, and the bytes add up."""
        assert set(self._states) == set(nodes)
        assert Counter(place.file for place in self._places.values()) == self._needed
        assert self._needed.keys() == self._pages.keys()
        sizes = sum(self._pages.values()) + sum(size for _, size in self._states.values())
        assert sizes == self.used_bytes


def _remove(files: PrefixFiles, number: int, pages: bool, state: bool) -> None:
    if state:
        files.remove_state(number)
    if pages:
        files.remove_pages(number)
