"""Where Denim's log lines go when the program that uses it says nothing about logging."""

from __future__ import annotations

import logging


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
