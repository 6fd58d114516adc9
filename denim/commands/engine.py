"""The engine behind `denim generate` and `denim chat`.

Owns the step from command-line text to engine options, how much is logged, and Ctrl-C: the first one ends
the answer at its next token, the second one ends the command.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from denim.ledger.units import plural

if TYPE_CHECKING:
    from denim.engine import LLM


def open_engine(
    model: Path | None, device: str, dtype: str, state_dtype: str, memory: str | None, quiet: bool
) -> LLM:
    """Load a model folder (None: the embedded model). Raises ConfigError or CapacityError."""
    logging.getLogger("denim").setLevel(logging.WARNING if quiet else logging.INFO)
    from denim.engine import LLM

    return LLM(
        model=model,
        device=device,
        dtype=dtype,
        state_dtype=state_dtype,
        memory=None if memory is None else memory_option(memory),
    )


def memory_option(text: str) -> str | float:
    """A fraction of the device ("0.5", "1.0") as a number, whether it can be or not ("1.5"); anything else
    stays text, such as "8GiB" or "2.5e9"."""
    try:
        value = float(text)
    except ValueError:
        return text
    return value if "." in text and "e" not in text.lower() else text


def whole_number(text: str) -> int | str:
    """A number where the text is one; anything else stays as it is, such as "auto"."""
    return int(text) if text.isascii() and text.isdecimal() else text


class Interrupt:
    """Whether Ctrl-C was pressed."""

    pressed = False


@contextmanager
def ctrl_c_ends_the_answer() -> Iterator[Interrupt]:
    """Inside, the first Ctrl-C only sets `pressed`, so that no step of the engine is cut in two; the
    second one raises KeyboardInterrupt."""
    interrupt = Interrupt()

    def note(number: int, frame: FrameType | None) -> None:
        if interrupt.pressed:
            raise KeyboardInterrupt
        interrupt.pressed = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


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

    @property
    def seconds_to_first(self) -> float:
        return self._first - self._start

    @property
    def tokens_per_second(self) -> float | None:
        """After the first token; None where there was no second one."""
        seconds = self._last - self._first
        return (self.tokens - 1) / seconds if self.tokens > 1 and seconds > 0 else None

    def __str__(self) -> str:
        rate = self.tokens_per_second
        speed = "" if rate is None else f", {rate:.0f} tokens/s after it"
        drawn = f"{self.tokens} {plural('token', self.tokens)}"
        return f"{drawn}, the first after {self.seconds_to_first * 1000:.0f} ms{speed}"
