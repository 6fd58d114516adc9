"""Where a text ends because a stop string came.

Owns the text that is held back because a stop string may have begun in it. Works on characters, so no
character is ever cut; knows nothing of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Checked(NamedTuple):
    """Text that may be shown, and the stop string that ended it (None: none yet)."""

    text: str
    stop: str | None


class StopStrings:
    """Looks for stop strings in a text that comes in pieces.

    The first match to be complete ends the text, and of those that end together the longest; so the
    result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        """`include`: the stop string itself is shown too."""
        self._stops = sorted(stops, key=len, reverse=True)
        self._include = include
        self._held = ""

    def push(self, piece: str) -> Checked:
        """What may be shown now that `piece` has come. To be called no more once a stop was met."""
        if not self._stops:
            return Checked(piece, None)
        text = self._held + piece
        met = [(at + len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if met:
            end, stop = min(met, key=lambda match: match[0])
            self._held = ""
            return Checked(text[: end if self._include else end - len(stop)], stop)
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return Checked(text[: len(text) - keep], None)

    def flush(self) -> str:
        """The text held back, at the end of a text that no stop string ended."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` with which `text` ends: it may be the stop to come."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
