"""Waiting for what another thread or process does.

The limit is there to end a test that would hang; that something is quick is not tested by the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 60.0  # seconds; everything here takes a few, more on a busy machine


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.01)
