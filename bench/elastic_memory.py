"""One elastic arena against memory that is split once: short requests, then long ones, then short ones again.

    python -m bench.elastic_memory [--short 10000] [--long 120] [--memory-gib 16] [--json FILE]

Runs the real scheduler over the real books of the arena, without a model: a step draws nothing and takes no
time, and no token budget holds requests back, so that memory alone decides who runs. All requests are there
from the beginning, first come, first served. For each phase (the time in which one of its requests is the
next to be admitted) the table tells how many ran, and which share of the arena the running requests held,
counted in the exact bytes of their slots and pages, while another one waited.

`fixed 30%` gives 30% of the slabs to states for good and the others to KV, as engines with two pools do.

The last line is what the books cost: time inside the arena, compaction included, of each step of the elastic
run with at most 256 seats.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any, NamedTuple

from bench.report import parser_of, write
from denim.ledger.preemption import recompute_rule
from denim.memory.arena import Arena, Tag
from denim.memory.layout import PAGE, SLOT, ArenaLayout
from denim.memory.swap import SwapSpace
from denim.scheduler.config import SchedulerConfig
from denim.scheduler.request import Request
from denim.scheduler.scheduler import Scheduler
from denim.spec.model import ModelSpec
from denim.spec.reader import read_spec

GIB = 2**30
CONFIG = Path(__file__).parent / "configs" / "qwen3.5-0.8b.json"
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
NO_LIMIT = 1 << 30  # tokens of a step, and seats


class Shape(NamedTuple):
    """A kind of request: `tokens` in all, of which at most `most_output` are drawn, evenly distributed, so
    that requests that began together end one by one."""

    name: str
    tokens: int
    most_output: int


SHORT = Shape("short", 100, 64)
LONG = Shape("long", 32_768, 1_024)


class SplitArena(Arena):
    """Two arenas in one: each class has slabs of its own for good. `slot_share` of all serves states."""

    def __init__(self, layout: ArenaLayout, num_slabs: int, slot_share: float) -> None:
        slots = min(max(1, round(num_slabs * slot_share)), num_slabs - 1)
        super().__init__(layout, num_slabs)
        slabs = {SLOT: slots, PAGE: num_slabs - slots}
        self._sides = {
            size.name: Arena(replace(layout, classes=(size,)), slabs[size.name]) for size in layout.classes
        }
        self._tags = self._sides[SLOT]._tags

    def alloc_many(self, name: str, n: int) -> list[int] | None:
        return self._sides[name].alloc_many(name, n)

    def share(self, name: str, ids: Sequence[int]) -> None:
        self._sides[name].share(name, ids)

    def release(self, name: str, ids: Sequence[int]) -> None:
        self._sides[name].release(name, ids)

    def holders(self, name: str, entry: int) -> int:
        return self._sides[name].holders(name, entry)

    def slabs_missing(self, need: Mapping[str, int]) -> int:
        return max(self._sides[name].slabs_missing({name: n}) for name, n in need.items())

    def free_entries(self, name: str) -> int:
        return 0  # nothing that compaction could give to the other side

    def tag(self, slot: int) -> Tag:
        return self._sides[SLOT].tag(slot)


@dataclass
class Phase:
    """What was seen in steps in which a request of this phase waited."""

    name: str
    running: list[int] = field(default_factory=list)
    held: list[float] = field(default_factory=list)  # share of the arena


@dataclass
class Outcome:
    phases: list[Phase]
    steps: int
    moves: int
    moved_bytes: int
    stats: dict[str, int]
    book_seconds: list[float]  # of each step


class Stopwatch:
    """Adds up the time inside the parts of a scheduler that take, give back and join memory."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.seconds = 0.0
        self._inside = False
        scheduler._grow = self._timed(scheduler._grow)
        for name in ("has_room", "take", "release"):
            setattr(scheduler._holdings, name, self._timed(getattr(scheduler._holdings, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            if self._inside:
                return method(*args, **options)
            self._inside = True
            begin = time.perf_counter()
            result = method(*args, **options)
            self.seconds += time.perf_counter() - begin
            self._inside = False
            return result

        return timed


def run(
    spec: ModelSpec,
    memory: int,
    phases: Sequence[tuple[Shape, int]],
    slot_share: float | None = None,
    seats: int = NO_LIMIT,
) -> Outcome:
    """`phases`: kinds of requests and how many, in order of arrival. `slot_share` None: the elastic arena."""
    layout = ArenaLayout.of(spec, 16)
    num_slabs = layout.num_slabs(memory)
    arena = Arena(layout, num_slabs) if slot_share is None else SplitArena(layout, num_slabs, slot_share)
    config = SchedulerConfig(64, seats, NO_LIMIT, spec.max_position)
    rule = recompute_rule(spec, layout.request_bytes, "cuda")
    scheduler = Scheduler(config, arena, SwapSpace(64 * GIB), rule)
    watch = Stopwatch(scheduler)
    phase_of: dict[int, int] = {}
    chance = random.Random(0)
    for at, (shape, count) in enumerate(phases):
        for _ in range(count):
            output = chance.randint(1, shape.most_output)
            request = Request(len(phase_of), [0] * (shape.tokens - output), output, sampling=())
            phase_of[request.id] = at
            scheduler.add(request)
    outcome = Outcome([Phase(shape.name) for shape, _ in phases], 0, 0, 0, {}, [])
    sizes = {size.name: size for size in layout.classes}
    while scheduler.requests:
        plan = scheduler.schedule()
        assert plan is not None
        outcome.moves += len(plan.moves)
        outcome.moved_bytes += sum(sizes[move.name].entry_bytes for move in plan.moves)
        scheduler.launched(plan)
        if scheduler._waiting:
            phase = outcome.phases[phase_of[scheduler._waiting[0].id]]
            running = list(scheduler._running)
            pages = sum(len(request.pages) for request in running)
            content = len(running) * sizes[SLOT].entry_bytes + pages * sizes[PAGE].entry_bytes
            phase.running.append(len(running))
            phase.held.append(content / (num_slabs * layout.slab_bytes))
        outcome.book_seconds.append(watch.seconds)
        watch.seconds = 0.0
        scheduler.update(plan, {span.request_id: 0 for span in plan.spans})
        outcome.steps += 1
        for request in [r for r in scheduler._running if r.exhausted]:
            scheduler.finish(request.id, "length")  # its memory counts to the next step's time
    scheduler.check()
    outcome.stats = scheduler.stats()
    return outcome


def rows(spec: ModelSpec, memory: int, phases: Sequence[tuple[Shape, int]]) -> list[dict[str, Any]]:
    found = []
    for share in (None, *SHARES):
        outcome = run(spec, memory, phases, share)
        row: dict[str, Any] = {"memory": "elastic" if share is None else f"fixed {share:.0%}"}
        for number, phase in enumerate(outcome.phases, 1):
            row[f"{number} {phase.name}: running"] = round(mean(phase.running))
            row[f"held {number}"] = f"{mean(phase.held):.1%}"
            row[f"least {number}"] = f"{min(phase.held):.1%}"
        row["steps"] = outcome.steps
        row["preempted"] = outcome.stats["preempted_swap"] + outcome.stats["preempted_recompute"]
        row["moved"] = outcome.moves
        row["moved GiB"] = outcome.moved_bytes / GIB
        found.append(row)
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--short", type=int, default=10_000)
    parser.add_argument("--long", type=int, default=120)
    parser.add_argument("--memory-gib", type=float, default=16)
    options = parser.parse_args()
    phases = [(SHORT, options.short), (LONG, options.long), (SHORT, options.short)]
    spec, memory = read_spec(CONFIG), int(options.memory_gib * GIB)
    write(options.json, "cpu", rows(spec, memory, phases))
    cost = run(spec, memory, phases, seats=256).book_seconds
    worst = quantiles(cost, n=100)[-1]
    print(f"books of 256 seats: {median(cost) * 1e6:.0f} µs a step, 99th percentile {worst * 1e6:.0f} µs")


if __name__ == "__main__":
    main()
