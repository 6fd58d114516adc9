"""From what is typed to an engine.

Owns the step from command-line text to engine options, and how much is logged.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

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
