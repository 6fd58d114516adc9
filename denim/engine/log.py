"""Where Denim's log lines go when the program that uses it says nothing of logging, and how they are few."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


def show_log() -> None:
    """Print lines of the logger "denim" to stderr, from INFO up, so that the start-up line is seen.

    A program that has set up logging, for all or for "denim", keeps what it chose.
    """
    logger = logging.getLogger("denim")
    if logger.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("denim: %(message)s"))
    logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


@contextmanager
def quiet_log(level: int) -> Iterator[None]:
    """Lines of the logger "denim" from `level` up alone: where engines start whose lines nobody asked for."""
    logger = logging.getLogger("denim")
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
