"""An answer on its way to the terminal, for `denim generate` and `denim chat`.

Owns how it is printed as it comes, its pace, and Ctrl-C: the first one ends the answer at its next token, the
second one ends the command.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from denim.errors import DenimError
from denim.ledger.units import plural

if TYPE_CHECKING:
    from denim.engine import StreamDelta

FAILED = "the engine failed on this request; the lines above say why"


class Pace:
    """How fast one answer comes: counts its tokens from the moment it is made."""

    def __init__(self) -> None:
        self._start = self._first = self._last = time.perf_counter()
        self.tokens = 0

    def count(self, tokens: int) -> None:
        """Note that so many tokens have just come."""
        self._last = time.perf_counter()
        if not self.tokens:
            self._first = self._last
        self.tokens += tokens

    def __str__(self) -> str:
        seconds = self._last - self._first
        after = self.tokens > 1 and seconds > 0
        speed = f", {(self.tokens - 1) / seconds:.0f} tokens/s after it" if after else ""
        drawn = f"{self.tokens} {plural('token', self.tokens)}"
        return f"{drawn}, the first after {(self._first - self._start) * 1000:.0f} ms{speed}"


class Answer(NamedTuple):
    """`interrupted`: Ctrl-C was pressed; then `finish_reason` is None unless the answer ended just then."""

    text: str
    pace: Pace
    finish_reason: str | None
    interrupted: bool


def print_answer(deltas: Iterable[StreamDelta]) -> Answer:
    """Print the text as it comes. Raises DenimError if the engine failed on it."""
    pace, parts, finish_reason = Pace(), [], None
    with _interrupt() as interrupt:
        for delta in deltas:
            pace.count(len(delta.token_ids))
            parts.append(delta.text)
            finish_reason = delta.finish_reason
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            if interrupt.pressed:
                break
    print()
    if finish_reason == "error":
        raise DenimError(FAILED)
    return Answer("".join(parts), pace, finish_reason, interrupt.pressed)


class _Interrupt:
    """Whether Ctrl-C was pressed."""

    pressed = False


@contextmanager
def _interrupt() -> Iterator[_Interrupt]:
    """Inside, the first Ctrl-C only sets `pressed`, so that no step of the engine is cut in two; the
    second one raises KeyboardInterrupt."""
    interrupt = _Interrupt()

    def note(number: int, frame: FrameType | None) -> None:
        if interrupt.pressed:
            raise KeyboardInterrupt
        interrupt.pressed = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
