"""A row of a table from work that may not run here.

Owns the step from a callable to a `Row`. A peer's failure is a result: it leaves its reason, and every other
row still comes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from bench.rules.clock import microseconds
from bench.rules.tables import Row


def measured(
    section: str,
    shape: str,
    name: str,
    work: Callable[[int], object],
    sets: int,
    floor: float,
) -> Row:
    """A row of `work`; what cannot run leaves a reason and no figure."""
    try:
        return Row(section, shape, name, microseconds(work, sets), floor)
    except Exception as error:
        return Row(
            section, shape, name, math.nan, floor, f"{type(error).__name__}: {error}".split("\n")[0][:160]
        )
