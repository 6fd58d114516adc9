"""Eight checkpoints in a long prompt: placed by how deep requests agreed so far, against even spacing.

    python -m bench.prefix_spacing [--recorded FILE] [--json FILE]

`less`: how much less is computed again, over the same depths. FILE is in Mooncake's format.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.prefix_traces import swe_like
from bench.report import parser_of, write
from denim.cache.node import Tokens
from denim.cache.recorded_trace import BLOCK, chains_of, read_trace
from denim.cache.replay import TraceRequest
from denim.cache.spacing import BINS, place
from denim.cache.tree import common_length

CHECKPOINTS = 8
LENGTHS = (16_384, 32_768, 65_536)
RECENT = 64  # requests that a new one is compared with
LEAST = 1024  # tokens; what is shorter is a system prompt, which has its own checkpoint


def again(weights: list[int], chosen: Iterable[int]) -> float:
    """Sum over depths of the distance to the checkpoint before, in bins."""
    begins = [0, *sorted(chosen)]
    return sum(
        weight * (at + 0.5 - max(begin for begin in begins if begin <= at))
        for at, weight in enumerate(weights)
    )


def row(name: str, depths: Iterable[int], length: int) -> dict[str, Any]:
    weights = [0] * BINS
    for depth in depths:
        if LEAST < depth <= length:
            weights[min(BINS - 1, depth * BINS // length)] += 1
    even = again(weights, (round(BINS * (i + 1) / (CHECKPOINTS + 1)) for i in range(CHECKPOINTS)))
    placed = again(weights, place(weights, CHECKPOINTS))
    return {"depths": name, "prompt": length, "requests": sum(weights), "less %": 100 * (1 - placed / even)}


def depths_of(trace: Iterable[TraceRequest]) -> list[int]:
    """How deep each request agrees with one of the last `RECENT`."""
    before: list[Tokens] = []
    depths = []
    for request in trace:
        prompt = request.tokens[: request.prompt]
        depths.append(max((common_length(other, prompt, 0) for other in before), default=0))
        before = [*before[1 - RECENT :], request.tokens]
    return depths


def recorded_depths(entries: Iterable[dict[str, Any]]) -> list[int]:
    """How deep each request agrees with any earlier one, in whole blocks."""
    seen: set[int] = set()
    depths = []
    for entry in entries:
        chains = chains_of(entry)
        known = next((n for n, chain in enumerate(chains) if chain not in seen), len(chains))
        depths.append(known * BLOCK)
        seen.update(chains)
    return depths


def planted() -> list[int]:
    """Around five places, as of system prompts and documents."""
    chance = random.Random(0)
    places = (2800, 7500, 8900, 20_500, 30_000)
    return [round(chance.gauss(chance.choice(places), 1000)) for _ in range(400)]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--recorded", type=Path)
    args = parser.parse_args()
    agents = swe_like(0, sessions=20)
    rows = [
        row("around five places", planted(), 32_768),
        row("swe-like", depths_of(agents), max(request.prompt for request in agents)),
    ]
    if args.recorded:
        trace = read_trace(args.recorded)
        assert trace is not None, "the trace names no blocks"
        depths = recorded_depths(trace.entries)
        rows += [row(args.recorded.stem, depths, length) for length in LENGTHS]
    write(args.json, "cpu", rows)


if __name__ == "__main__":
    main()
