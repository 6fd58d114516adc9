"""The part of `denim plan --trace` on prefixes: how much of the trace would be reused, by memory.

Owns the sizes that are tried and the printed form. Knows the replay of a trace; must not import torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from denim.ledger.budget import DEFAULT_BATCHED_TOKENS
from denim.ledger.units import size_text
from denim.memory.capacity_plan import CapacityPlan

SHARES = (0.5, 1, 2, 4)
"""Memory that is tried, in arenas; what lies beyond one would be host memory."""

BOUNDLESS = 1 << 60  # bytes


def prefix_curve(plan: CapacityPlan, trace: Path) -> list[dict[str, Any]] | None:
    """Points with `memory_bytes` (None: without limit), token_hit_rate, flop_hit_rate, evicted; None for a
    trace that does not say what its prompts have in common. Raises ConfigError for one that is broken."""
    from denim.cache.hit_curve import hit_curve
    from denim.cache.recorded_trace import read_trace

    recorded = read_trace(trace)
    if recorded is None:
        return None
    segment = DEFAULT_BATCHED_TOKENS[plan.device.kind]
    sizes = [int(plan.arena_bytes * share) for share in SHARES]
    points = hit_curve(plan.spec, plan.layout, recorded, [*sizes, BOUNDLESS], segment)
    return [
        point._asdict() | {"memory_bytes": None if point.memory_bytes == BOUNDLESS else point.memory_bytes}
        for point in points
    ]


def curve_table(points: list[dict[str, Any]]) -> Table:
    grid = Table(box=SIMPLE_HEAD, title="prefixes of this trace, policy auto", title_justify="left")
    for heading in ("memory", "tokens reused", "FLOPs saved", "checkpoints evicted"):
        grid.add_column(heading, justify="right")
    for point in points:
        memory = point["memory_bytes"]
        grid.add_row(
            "no limit" if memory is None else size_text(memory),
            f"{point['token_hit_rate']:.1%}",
            f"{point['flop_hit_rate']:.1%}",
            f"{point['evicted']:,}",
        )
    return grid
