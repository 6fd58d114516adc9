"""Policies and eviction orders of the prefix cache beside the peers' rules: token hit rates on traces.

    python -m bench.prefix_cache [--trace lmsys-like …] [--seeds 3] [--recorded FILE] [--json FILE]

The real tree, policies and orders run without a model (denim.cache.replay).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from bench.prefix_peers import JUDICIOUS, AnyLru, GreedyDual, LeafLru, LeastRecent, Marconi, grid_lru
from bench.prefix_traces import lmsys_like, sharegpt_like, swe_like
from bench.report import parser_of, write
from denim.cache.byte_arena import ByteArena
from denim.cache.eviction import Order, Worth
from denim.cache.expected import Expected
from denim.cache.positions import POLICIES, Grid, Policy
from denim.cache.prefix_cache import PrefixCache
from denim.cache.recorded_trace import read_trace
from denim.cache.replay import Clock, TraceRequest, replay
from denim.cache.spacing import OverlapDepths
from denim.cache.tree import PrefixTree
from denim.ledger.devices import find_device
from denim.ledger.flops import CHUNK
from denim.memory.layout import PAGE, SLOT, ArenaLayout, SizeClass

GB = 10**9
TAIL = 0.95
H200_FLOPS = find_device("H200").flops  # for the least time to the first token, computed alone
SEGMENT = 8192  # tokens prefilled in one step, for the policies that go by them


class Geometry(NamedTuple):
    name: str
    state_bytes: int
    token_bytes: int
    flops: Callable[[int], float]


def _paper_flops(tokens: int) -> float:
    """7B parameters, four attention layers of width 4096, causal."""
    return 2 * 7e9 * tokens + 2 * 4 * 4096 * tokens**2


PAPER = Geometry("paper", 26_800_000, 65_536, _paper_flops)


OrderOf = Callable[[Worth, Clock], Order]

PEERS: dict[str, tuple[Policy, OrderOf]] = {
    "SGLang+": (JUDICIOUS, lambda worth, clock: LeafLru()),
    "LRU-any": (JUDICIOUS, lambda worth, clock: AnyLru()),
    "GDS": (JUDICIOUS, lambda worth, clock: GreedyDual(worth)),
}
OURS: dict[str, tuple[Policy, OrderOf]] = {
    "auto, LRU": (POLICIES["auto"], lambda worth, clock: LeastRecent()),
    "auto, GDS": (POLICIES["auto"], lambda worth, clock: GreedyDual(worth)),
    "auto": (POLICIES["auto"], Expected),
}
ALPHAS = (0.0, 0.25, 0.5, 1.0, 2.0)


def hit_rate(
    trace: list[TraceRequest], geometry: Geometry, memory: int, policy: Policy, order_of: OrderOf, page: int
) -> dict[str, Any]:
    """The cache's account after the trace, and the FLOPs that 95% of the requests do not exceed."""
    classes = (
        SizeClass(PAGE, page * geometry.token_bytes, page * geometry.token_bytes, 1),
        SizeClass(SLOT, geometry.state_bytes, geometry.state_bytes, 1),
    )
    arena: Any = ByteArena(ArenaLayout(page, 1, classes, (), ()), memory)
    tree = PrefixTree(arena, ids_limit=4 * memory // geometry.token_bytes)
    clock = Clock()
    order = order_of(Worth(tree, geometry.flops, classes[0].stride, classes[1].stride), clock)
    block = -(-geometry.state_bytes // geometry.token_bytes)
    grid = Grid(block, SEGMENT, CHUNK, OverlapDepths(4 * block))
    cache = PrefixCache(arena, tree, order, policy, grid, geometry.flops, arena.can_alloc)
    reused = replay(trace, cache, arena, clock)
    cache.check()
    left = sorted(geometry.flops(prompt) - geometry.flops(position) for prompt, position in reused)
    return cache.stats() | {"p95_flops": left[min(len(left) - 1, int(TAIL * len(left)))]}


def _percent(stats: dict[str, Any]) -> float:
    return 100 * stats["hit_tokens"] / stats["query_tokens"]


def row(name: str, trace: list[TraceRequest], geometry: Geometry, memory: int, page: int) -> dict[str, Any]:
    hits, queries = grid_lru(trace, memory, geometry.state_bytes, geometry.token_bytes)
    cells: dict[str, Any] = {"trace": name, "GB": memory / GB, "vLLM+": 100 * hits / queries}
    for column, (policy, order_of) in PEERS.items():
        cells[column] = _percent(hit_rate(trace, geometry, memory, policy, order_of, page))
    marconi = [
        hit_rate(trace, geometry, memory, JUDICIOUS, lambda w, c, a=alpha: Marconi(w, a), page)
        for alpha in ALPHAS
    ]
    more = {"Marconi": max(marconi, key=_percent)}
    for column, (policy, order_of) in OURS.items():
        more[column] = hit_rate(trace, geometry, memory, policy, order_of, page)
    more["unlimited"] = hit_rate(trace, geometry, 10**16, JUDICIOUS, lambda w, c: LeastRecent(), page)
    cells |= {column: _percent(stats) for column, stats in more.items()}
    for column in ("Marconi", "auto"):
        stats = more[column]
        cells[f"{column}, FLOPs"] = 100 * stats["hit_flops"] / stats["query_flops"]
        cells[f"{column}, P95 ms"] = 1e3 * stats["p95_flops"] / H200_FLOPS
    return cells


CELLS = {
    "lmsys-like": (lmsys_like, (2, 3, 5)),
    "sharegpt-like": (sharegpt_like, (5, 10)),
    "swe-like": (swe_like, (40, 60)),
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--trace", nargs="*", choices=list(CELLS), default=list(CELLS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--recorded", type=Path, help="a trace in Mooncake's format")
    parser.add_argument("--requests", type=int, default=1500, help="of the recorded trace")
    args = parser.parse_args()
    begin = time.perf_counter()
    rows = []
    for name in args.trace:
        make, sizes = CELLS[name]
        traces = [make(seed) for seed in range(args.seeds)]
        for size in sizes:
            rows.append(_mean([row(name, trace, PAPER, size * GB, 16) for trace in traces]))
    if args.recorded:
        recorded = read_trace(args.recorded, args.requests)
        assert recorded is not None, "the trace names no blocks"
        rows.append(row(args.recorded.stem, list(recorded), PAPER, 60 * GB, page=128))
    write(args.json, "cpu", rows)
    print(f"{time.perf_counter() - begin:.0f} s")


def _mean(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        key: mean(row[key] for row in rows) if isinstance(value, float) else value
        for key, value in rows[0].items()
    }


if __name__ == "__main__":
    main()
