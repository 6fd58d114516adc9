"""What an engine has in hand, by its statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def in_use(stats: Mapping[str, Any]) -> int:
    """Entries of memory that requests hold, and requests in work; 0: idle, and nothing lost."""
    held = [stats[kind]["used"] for kind in ("slabs", "pages", "slots")]
    return sum([*held, stats["running"], stats["waiting"], stats["swapped"]])
