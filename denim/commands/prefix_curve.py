"""The part of `denim plan --trace` on prefixes: how much of the trace would be reused, by memory.

Owns the sizes that are tried and the printed form. Knows the replay of a trace; must not import torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from denim.ledger.budget import DEFAULT_BATCHED_TOKENS
from denim.ledger.step_floor import weights_read
from denim.ledger.units import size_text
from denim.memory.capacity_plan import CapacityPlan

SHARES = (0.5, 1)
"""Memory on the device that is tried, in arenas."""

HOST_GIB = (64, 256, 1024)
"""Host memory beside a whole arena, on each device, where the plan names none."""

BOUNDLESS = 1 << 60  # bytes


def prefix_curve(plan: CapacityPlan, trace: Path) -> list[dict[str, Any]] | None:
    """Points with arena_bytes, host_bytes (None: without limit), token_hit_rate, flop_hit_rate, evicted, and
    p95_seconds: the least time to the first token of a request with more to compute than 95% of them. None
    for a trace that does not say what its prompts have in common. Raises ConfigError for a broken one."""
    from denim.cache.hit_curve import hit_curve
    from denim.cache.recorded_trace import read_trace

    recorded = read_trace(trace)
    if recorded is None:
        return None
    memories: list[tuple[int, int | None]] = [(int(plan.arena_bytes * share), 0) for share in SHARES]
    hosts = [plan.host_bytes] if plan.host_bytes else [gib << 30 for gib in HOST_GIB]
    memories += [(plan.arena_bytes, host) for host in [*hosts, None]]
    sizes = [BOUNDLESS if host is None else arena + host for arena, host in memories]
    segment = DEFAULT_BATCHED_TOKENS[plan.device.kind]
    points = hit_curve(plan.spec, plan.layout, recorded, sizes, segment)
    return [
        {
            "arena_bytes": arena,
            "host_bytes": host,
            "token_hit_rate": point.token_hit_rate,
            "flop_hit_rate": point.flop_hit_rate,
            "evicted": point.evicted,
            "p95_seconds": _seconds(plan, *point.tail),
        }
        for (arena, host), point in zip(memories, points, strict=True)
    ]


def _seconds(plan: CapacityPlan, prompt: int, position: int) -> float:
    """The least time to compute a prompt behind `position`, alone: the ledger's roofline."""
    from denim.cache.sizing import prefill_curve

    flops = prefill_curve(plan.spec)
    left = flops(prompt) - flops(position)
    return plan.device.seconds(weights_read(plan.spec, prompt - position, plan.device), left)


def curve_table(points: list[dict[str, Any]]) -> Table:
    grid = Table(box=SIMPLE_HEAD, title="prefixes of this trace, policy auto", title_justify="left")
    for heading in ("arena", "host memory", "tokens reused", "FLOPs saved", "evicted", "P95 to first token"):
        grid.add_column(heading, justify="right")
    for point in points:
        host = point["host_bytes"]
        grid.add_row(
            size_text(point["arena_bytes"]),
            "no limit" if host is None else size_text(host) if host else "none",
            f"{point['token_hit_rate']:.1%}",
            f"{point['flop_hit_rate']:.1%}",
            f"{point['evicted']:,}",
            f"{1000 * point['p95_seconds']:,.0f} ms",
        )
    return grid
