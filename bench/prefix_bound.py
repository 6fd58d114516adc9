"""What a rule that does not see the future could reuse of a recorded trace.

    python -m bench.prefix_bound FILE [--memory 256] [--json FILE]

FILE is in Mooncake's format; memory in GB, in the geometry of Qwen3.5-35B-A3B. A rule keeps what a request
leaves, one state and its KV, for as long as its class is worth keeping: a class is all that is known when the
request ends (which turn it is, how long, …). The best times are found in hindsight: those that reuse the most
tokens for so many bytes × seconds. That is more than a cache gets that keeps by class and age: memory is full
on average only, and beginnings that many requests share cost nothing.

`other half`: the times are found on one half of the conversations and applied to the other, as a rule must
that has to learn them.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import pairwise
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

from bench.report import parser_of, write
from denim.cache.recorded_trace import BLOCK, chains_of, read_trace
from denim.memory.layout import PAGE, SLOT, ArenaLayout
from denim.spec.published import published_configs
from denim.spec.reader import read_spec

GB = 10**9
SHARED_BLOCKS = 2  # of a beginning that is a system prompt rather than a conversation
AGES = (0, 10, 20, 30, 45, 60, 75, 90, 105, 120, 150, 180, 210, 240, 270, 300, 360, 420, 480, 540, 600, 750,
        900, 1200, 1800, 3600)  # fmt: skip


class Left(NamedTuple):
    """What one request leaves. waits: seconds until another one goes on from it, or to the end of the trace.
    reused: tokens that this one reuses then; 0: nobody goes on."""

    root: int
    size: float
    waits: float
    reused: int
    turn: int
    prompt: int
    answer: int
    gap: float  # seconds since the turn before; -1: the first


Class = Callable[[Left], Hashable]


def _log(value: float, unit: float, most: int) -> int:
    return min(most, int(log2(max(1.0, value / unit))))


CLASSES: dict[str, Class] = {
    "age alone": lambda left: 0,
    "and turn": lambda left: min(left.turn, 6),
    "and length": lambda left: (min(left.turn, 6), _log(left.prompt, 1000, 9)),
    "and answer": lambda left: (min(left.turn, 4), _log(left.prompt, 1000, 9), _log(left.answer, 25, 5)),
    "and last gap": lambda left: (
        min(left.turn, 4), _log(left.prompt, 1000, 9), _log(left.answer, 25, 5), _log(left.gap, 15, 6),
    ),
}  # fmt: skip


def read_left(path: Path, state: float, token: float) -> tuple[list[Left], int, int]:
    """What all requests leave, the tokens of shared beginnings that are reused, and those of all prompts."""
    trace = read_trace(path)
    assert trace is not None, "the trace names no blocks"
    entries = trace.entries
    end = entries[-1]["timestamp"] / 1000
    last_with: dict[int, int] = {}  # hash of a chain of blocks -> the last request that has it
    before: list[int | None] = []
    follows: list[tuple[float, int] | None] = [None] * len(entries)
    turns, roots, shared = [], [], 0
    for at, entry in enumerate(entries):
        chains = chains_of(entry)
        full = chains[: entry["input_length"] // BLOCK]
        known = next((n for n in range(len(full), 0, -1) if full[n - 1] in last_with), 0)
        previous = last_with[full[known - 1]] if known > SHARED_BLOCKS else None
        shared += known * BLOCK if previous is None else 0
        if previous is not None and follows[previous] is None:
            follows[previous] = ((entry["timestamp"] - entries[previous]["timestamp"]) / 1000, known * BLOCK)
        before.append(previous)
        turns.append(0 if previous is None else turns[previous] + 1)
        roots.append(at if previous is None else roots[previous])
        last_with.update(dict.fromkeys(chains, at))
    left = []
    for at, entry in enumerate(entries):
        previous, now = before[at], entry["timestamp"] / 1000
        waits, reused = follows[at] or (end - now, 0)
        gap = -1.0 if previous is None else now - entries[previous]["timestamp"] / 1000
        prompt, answer = entry["input_length"], entry["output_length"]
        size = state + token * (prompt + answer)
        left.append(Left(roots[at], size, waits, reused, turns[at], prompt, answer, gap))
    return left, shared, sum(entry["input_length"] for entry in entries)


Costs = dict[Hashable, tuple[list[int], list[float]]]
"""Class -> by number of ages: tokens that are reused up to there, and bytes × seconds."""


def costs(left: Iterable[Left], of: Class) -> Costs:
    groups: dict[Hashable, list[Left]] = defaultdict(list)
    for one in left:
        groups[of(one)].append(one)
    found: Costs = {}
    for name, group in groups.items():
        hits, spent = [0], [0.0]
        for begin, end in pairwise(AGES):
            there = [one for one in group if one.waits > begin]
            hits.append(hits[-1] + sum(one.reused for one in there if one.waits <= end))
            spent.append(spent[-1] + sum(one.size * (min(one.waits, end) - begin) for one in there))
        found[name] = (hits, spent)
    return found


def times(found: Costs, price: float) -> dict[Hashable, int]:
    """Up to which age each class pays where a byte × second costs `price` tokens."""
    return {
        name: max(range(len(AGES)), key=lambda n: hits[n] - price * spent[n])
        for name, (hits, spent) in found.items()
    }


def taken(found: Costs, ages: Mapping[Hashable, int]) -> tuple[int, float]:
    return (
        sum(hits[ages.get(name, 0)] for name, (hits, _) in found.items()),
        sum(spent[ages.get(name, 0)] for name, (_, spent) in found.items()),
    )


def best(kept: Callable[[float], tuple[int, float]], budget: float) -> float:
    """Most tokens within `budget`, over all prices; between two prices in proportion to what is left."""
    low, high = 0.0, 1e-3
    for _ in range(60):
        middle = (low + high) / 2
        if kept(middle)[1] > budget:
            low = middle
        else:
            high = middle
    (more, beyond), (tokens, within) = kept(low), kept(high)
    return tokens + (more - tokens) * (budget - within) / (beyond - within) if beyond > within else tokens


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--memory", type=int, default=256)
    args = parser.parse_args()
    layout = ArenaLayout.of(read_spec(published_configs()["Qwen3.5-35B-A3B"], dtype="bfloat16"), 16)
    state, page = (layout.size_class(name).stride for name in (SLOT, PAGE))
    left, shared, asked = read_left(args.trace, state, page / layout.page_size)
    budget = args.memory * GB * max(one.waits for one in left)
    chance = random.Random(0)
    side = {root: chance.random() < 0.5 for root in sorted({one.root for one in left})}
    halves = [[one for one in left if side[one.root] == half] for half in (False, True)]
    rows: list[dict[str, Any]] = []
    for name, of in CLASSES.items():
        whole = costs(left, of)
        mine, theirs = (costs(half, of) for half in halves)

        def learned(price: float, mine: Costs = mine, theirs: Costs = theirs) -> tuple[int, float]:
            a, b = taken(mine, times(theirs, price)), taken(theirs, times(mine, price))
            return a[0] + b[0], a[1] + b[1]

        hindsight = best(lambda price, whole=whole: taken(whole, times(whole, price)), budget)
        rows.append(
            {
                "known of a request": name,
                "classes": len(whole),
                "in hindsight %": 100 * (shared + hindsight) / asked,
                "other half %": 100 * (shared + best(learned, budget)) / asked,
            }
        )
    write(args.json, "cpu", rows)


if __name__ == "__main__":
    main()
