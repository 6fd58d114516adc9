"""Text that comes in pieces, for readers that are written as if it were whole.

Owns the text that was received and not yet read. A reader is a generator: it yields what it has made of the
text, and None where it can say no more until more text is there. Knows nothing of what the text means.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

from denim.engine.stop import overlap
from denim.server.reply_parts import ReplyPart

T = TypeVar("T")
Reader = Generator[ReplyPart | None, None, T]

SPACE = " \t\r\n"


class Unreadable(Exception):
    """The text is not what the reader reads. What was read since the last `mark` is to be read otherwise."""


class BrokenOff(Unreadable):
    """The text is what the reader reads, but it has ended in the middle."""


class Incoming:
    """`rest` is the text that has come and was not read; after `ended` there comes no more."""

    def __init__(self) -> None:
        self.rest = ""
        self.ended = False
        self._since_mark = ""

    def push(self, text: str) -> None:
        self.rest += text

    def end(self) -> None:
        self.ended = True

    def take(self, length: int) -> str:
        taken, self.rest = self.rest[:length], self.rest[length:]
        self._since_mark += taken
        return taken

    def mark(self) -> None:
        """What was read is settled: `rewind` comes back to here."""
        self._since_mark = ""

    def rewind(self) -> None:
        self.rest, self._since_mark = self._since_mark + self.rest, ""

    def cut(self, markers: Sequence[str]) -> tuple[str, str | None]:
        """Read up to and with the first of `markers`. Returns the text before it that can be no part of any,
        and the marker; None: there is none in what has come. A marker may contain another only at its end."""
        found = [(at, marker) for marker in markers if (at := self.rest.find(marker)) >= 0]
        if found:
            at, marker = min(found)
            text = self.take(at)
            self.take(len(marker))
            return text, marker
        begun = max((overlap(self.rest, marker) for marker in markers), default=0)
        return self.take(len(self.rest) - begun), None

    # Readers

    def more(self) -> Reader[None]:
        """Wait for more text. Raises BrokenOff if there comes no more."""
        if self.ended:
            raise BrokenOff
        yield None

    def begins(self, *markers: str) -> Reader[str | None]:
        """Read one of `markers` if the rest begins with it, and return it; otherwise read nothing."""
        while True:
            met = [marker for marker in markers if self.rest.startswith(marker)]
            longer = [marker for marker in markers if marker.startswith(self.rest) and marker != self.rest]
            if self.ended or not longer:
                best = max(met, key=len, default=None)
                if best is not None:
                    self.take(len(best))
                return best
            yield None

    def expect(self, *markers: str) -> Reader[str]:
        """Read one of `markers`. Raises Unreadable if none is there."""
        met = yield from self.begins(*markers)
        if met is None:
            partial = any(marker.startswith(self.rest) for marker in markers)
            raise BrokenOff if partial else Unreadable
        return met

    def skip(self, characters: str = SPACE) -> Reader[str]:
        """Read over `characters`. Returns the one behind them, unread. May raise BrokenOff."""
        while True:
            self.take(len(self.rest) - len(self.rest.lstrip(characters)))
            if self.rest:
                return self.rest[0]
            yield from self.more()

    def until(self, *markers: str) -> Reader[str]:
        """Read up to and with the first of `markers`; returns the text before it. May raise BrokenOff."""
        text = ""
        while True:
            piece, marker = self.cut(markers)
            text += piece
            if marker is not None:
                return text
            yield from self.more()
