"""One checkpoint on its way between the device and host memory, as the scheduler tells the runner.

Plain data: which entries, on either side. Who decides it is `denim.cache.lower_tiers`; who carries it out is
`denim.memory.host_memory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Transfer(NamedTuple):
    """`slot` and `pages` are the device's entries, `host_slot` and `host_pages` those of host memory, in the
    same order. A slot is -1 where none travels, on both sides. `pending` updates of the slot are only
    recorded, and are written to the state before it leaves.
    """

    key: int
    slot: int
    pages: Sequence[int]
    host_slot: int
    host_pages: Sequence[int]
    pending: int = 0
