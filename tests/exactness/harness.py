"""The same requests, run in many ways: the axes, and how a way is driven.

A `Way` says how requests are run. An axis is a dict of named changes of a way; `AXES` holds all of them, and
`crossings` picks few ways in which every pair of values of any two axes meets. A new feature joins the
matrix by one more entry of `AXES`: see README.md here. Whether a result is right is `judge.py`'s business.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from denim.engine import memory_plan
from denim.engine.core import EngineCore
from denim.engine.loading import load
from denim.engine.options import EngineOptions
from denim.engine.outputs import RequestOutput
from denim.memory.layout import ArenaLayout
from denim.sampling_params import SamplingParams

DEVICE = os.environ.get("DENIM_TEST_DEVICE", "cpu")  # of the engines; the reference stays on the CPU

BUMP_GROWTH = 1.3
MOST_STEPS = 20_000
PUSHED_EACH = 7  # steps


class Case(NamedTuple):
    """One request. Every run of it must give the same."""

    prompt: list[int]
    params: SamplingParams


def greedy(prompt: list[int], max_tokens: int, **params: Any) -> Case:
    return Case(prompt, SamplingParams(temperature=0, max_tokens=max_tokens, **params))


@dataclass(frozen=True)
class Way:
    """How requests are run.

    options: options of the engine, beside model and memory.
    slabs: the arena; None: all requests fit at once. An arena too small for the longest request is widened.
    company: "alone" (one after another), "together" (all at once), or "joining" (at random steps, among
        mates that join and are aborted at random steps).
    bump: after so many steps urgent requests take all seats and every running one gives way, and so again
        after ever longer gaps, so that those that must compute all again get to their end. 0: never.
    swap: what gives way moves to the host even where the ledger says that computing again is cheaper.
    recycled: before the first request others have used the memory, and were aborted or ended.
    warm: the same requests have run before, in the same way; these here begin from what those left.
    moving: before every step some live entries move to other places.
    pushed: before every few steps all checkpoints are pushed out of the arena, and whatever lies in a lower
        tier is brought up from there, however short it is.
    files: what is in host memory is written to a fresh directory, and pushed out of host memory likewise.
    forks: completions asked of every request that asks for one; all must be alike (greedy) or equal what
        the request with the next seed gives (random).
    shuffled: requests come in another order, with random priorities.
    record_from: decode rows from which a step with deferred writes defers them.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    slabs: int | None = None
    company: str = "together"
    bump: int = 0
    swap: bool = False
    recycled: bool = False
    warm: bool = False
    moving: bool = False
    pushed: bool = False
    files: bool = False
    forks: int = 1
    shuffled: bool = False
    record_from: int = 0
    seed: int = 0

    def with_options(self, **options: Any) -> Way:
        return replace(self, options={**self.options, **options})


COLD = Way({"checkpoint_policy": "none"}, company="alone")

Change = Callable[[Way], Way]


def option(**options: Any) -> Change:
    return lambda way: way.with_options(**options)


def change(**fields: Any) -> Change:
    return lambda way: replace(way, **fields)


def preempted(swap: bool) -> Change:
    """Few seats and urgent newcomers: requests give way in any crossing, one way or the other."""
    return lambda way: replace(way, bump=5, swap=swap).with_options(
        max_num_seqs=2, swap_space="1GiB" if swap else 0
    )


def warm(policy: str) -> Change:
    """All requests run a second time, on what checkpoints of this policy the first time left."""
    return lambda way: replace(way, warm=True).with_options(checkpoint_policy=policy)


def pushed(files: bool) -> Change:
    """Checkpoints live in lower tiers, and come up from there."""
    return lambda way: replace(way, pushed=True, files=files).with_options(host_memory="16MiB")


def by_size(way: Way) -> Way:
    """Writes are deferred while at least three requests decode."""
    return replace(way, record_from=3).with_options(deferred_writes=3)


AXES: dict[str, dict[str, Change]] = {
    "segments": {
        "whole": change(),
        **{str(n): option(max_num_batched_tokens=n) for n in (1, 2, 5, 17, 63, 64, 65, 100)},
    },
    "company": {name: change(company=name) for name in ("alone", "together", "joining")},
    "preempted": {"never": change(), "swapped": preempted(swap=True), "recomputed": preempted(swap=False)},
    "memory": {"roomy": change(), "tight": change(slabs=0), "moving": change(moving=True, recycled=True)},
    "prefixes": {
        "none": option(checkpoint_policy="none"),
        "cold": change(),
        **{name: warm(name) for name in ("auto", "ends", "align", "all")},
    },
    "tiers": {"none": change(), "host": pushed(False), "files": pushed(True)},
    "slots": {"fresh": change(), "recycled": change(recycled=True)},
    "forks": {"1": change(), "3": change(forks=3)},
    "order": {"given": change(), "shuffled": change(shuffled=True)},
    "writes": {
        "every step": option(deferred_writes=None),
        "deferred": option(deferred_writes=3),
        "in large steps": by_size,
    },
    "steps": {"one by one": change(), "overlapped": option(async_scheduling=True)},
    **({"graphs": {"captured": change(), "eager": option(enforce_eager=True)}} if DEVICE == "cuda" else {}),
    "page_size": {str(n): option(page_size=n) for n in (16, 1, 4, 32)},
    "chunk_size": {str(n): option(chunk_size=n) for n in (64, 1, 16, 128)},
}


class Crossing(NamedTuple):
    names: tuple[str, ...]  # a value of each axis, in the order of AXES
    way: Way


def crossings(seed: int = 0) -> list[Crossing]:
    """Ways in which every pair of values of two axes meets at least once (greedy pairwise design)."""
    chance = random.Random(seed)
    axes = list(AXES)
    missing = {
        ((a, x), (b, y))
        for a, b in combinations(range(len(axes)), 2)
        for x, y in product(AXES[axes[a]], AXES[axes[b]])
    }
    rows = []
    while missing:
        best, gain = (), -1
        first = min(missing)  # so that every row covers something new
        for _ in range(60):
            row = [chance.choice(list(AXES[axis])) for axis in axes]
            for place, value in first:
                row[place] = value
            count = sum(pair in missing for pair in combinations(enumerate(row), 2))
            if count > gain:
                best, gain = tuple(row), count
        missing -= set(combinations(enumerate(best), 2))
        way = Way(seed=len(rows))
        for axis, value in zip(axes, best, strict=True):
            way = AXES[axis][value](way)
        rows.append(Crossing(best, way))
    return rows


class Run(NamedTuple):
    """`outputs` in the order of the cases. `preemptions` of each, and `stats` of the engine at the end."""

    outputs: list[RequestOutput]
    preemptions: list[int]
    stats: dict[str, Any]


def run(folder: Path, cases: Sequence[Case], way: Way = COLD) -> Run:
    """Run `cases` in one way, with freed memory full of NaN and all invariants checked after every step.

    At the end nothing may be left in memory but what the prefix cache keeps, and gives back.
    """
    core = make_core(folder, cases, way)
    driver = _Driver(core, cases, way)
    if way.recycled:
        driver.dirty_all_memory()
    if way.warm:
        _Driver(core, cases, replace(way, bump=0)).drive()
    driver.drive()
    core.scheduler.prefixes.write_out()
    stats = core.stats()
    assert not core.has_work
    assert [stats[kind]["used"] for kind in ("slabs", "pages", "slots")] == [0, 0, 0], stats
    assert core.swap.used_bytes == 0
    core.reset_prefix_cache()
    core.check()
    assert core.arena.stats()["slabs"]["used"] == 0, "the prefix cache held on to something"
    core.close()
    return Run(driver.outputs, driver.preemptions, stats)


def make_core(folder: Path, cases: Sequence[Case], way: Way) -> EngineCore:
    longest = max(len(case.prompt) + (case.params.max_tokens or 0) for case in cases)
    options = {"max_model_len": longest, "max_num_seqs": 64, "debug": True, "device": DEVICE, **way.options}
    if way.files and options.get("checkpoint_policy") != "none":
        options.setdefault("disk_cache", tempfile.mkdtemp(prefix="denim-files-"))
    loaded = load(EngineOptions.of(model=folder, **options))
    page_size, records = (
        options.get("page_size", EngineOptions.page_size),
        options.get("deferred_writes") or 0,
    )
    if not any(layer.mixer.record_tensors(2) for layer in loaded.spec.layers):
        options.pop("deferred_writes", None)  # refused where no layer can defer its writes
    layout = ArenaLayout.of(loaded.spec, page_size, records=records)
    alone = layout.slabs_for(layout.need(longest))
    roomy = max(64, 16 * alone * way.forks)  # all at once, and what each completion leaves in the cache
    slabs = roomy if way.slabs is None else max(way.slabs, alone)
    options = EngineOptions.of(model=folder, **options, memory=slabs * layout.slab_bytes)
    with patch.object(memory_plan, "FORCED_FROM", way.record_from):
        core = EngineCore(options, loaded)
    if way.swap:
        core.scheduler._recompute_cheaper = lambda tokens: False
    tiers = core.scheduler.prefixes.tiers
    if way.pushed and tiers is not None:
        tiers.pays = lambda start, end, nbytes, tier: True
    return core


class _Driver:
    """Adds requests, mates and urgent newcomers at their steps, and steps the engine to the end."""

    def __init__(self, core: EngineCore, cases: Sequence[Case], way: Way) -> None:
        self.core = core
        self.way = way
        self.chance = random.Random(way.seed)
        self.longest = core.scheduler.config.max_model_len
        self.cases = [
            case if case.params.n > 1 else case._replace(params=replace(case.params, n=way.forks))
            for case in cases
        ]
        self.outputs: list[RequestOutput] = [None] * len(cases)  # type: ignore[list-item]
        self.preemptions = [0] * len(cases)
        self._case_of: dict[str, int] = {}
        self._mates: list[str] = []
        self._mates_to_come = (
            20  # an end to them, or mates of better priority could keep a request out for ever
        )

    def dirty_all_memory(self) -> None:
        """Others write to the low end of the arena, which is handed out first; half of them are aborted."""
        ids = [self._add_other(min(self.longest - 1, 60), max_tokens=6) for _ in range(16)]
        for _ in range(12):
            self.core.step()
        for id_ in ids[::2]:
            self.core.abort(id_)
        while self.core.has_work:
            self.core.step()

    def drive(self) -> None:
        order = list(range(len(self.cases)))
        if self.way.shuffled:
            self.chance.shuffle(order)
        arrivals = [self.chance.randrange(40) if self.way.company == "joining" else 0 for _ in order]
        waiting = [place for _, place in sorted(zip(arrivals, order, strict=True), key=lambda pair: pair[0])]
        arrivals.sort()
        step = 0
        next_bump = gap = self.way.bump
        while waiting or self._running():
            while waiting and arrivals[0] <= step and not (self.way.company == "alone" and self._running()):
                self._add_case(waiting.pop(0))
                arrivals.pop(0)
            if self.way.company == "joining":
                self._mates_come_and_go()
            if self.way.bump and step >= next_bump:
                for _ in range(self.core.scheduler.config.max_running):
                    self._mates.append(
                        self._add_other(self.chance.randrange(1, 4), priority=-9, max_tokens=2)
                    )
                gap *= BUMP_GROWTH
                next_bump += gap
            if self.way.moving:
                self._move_entries()
            if self.way.pushed and step % PUSHED_EACH == 0:
                self._push_out()
            self.core.step()
            self._note_preemptions()
            step += 1
            assert step < MOST_STEPS, "no progress"
        for id_ in self._mates:
            self.core.abort(id_)

    def _move_entries(self) -> None:
        """As compaction would, but a few of each class, anywhere, and for nothing."""
        arena, compactor = self.core.arena, self.core.scheduler._holdings.compactor
        for size in arena.layout.classes:
            pending = compactor._pending.get(size.name, {})
            slabs = arena.free_in_open(size.name)
            free = [entry for slab in slabs for entry in arena.free_in(slab)]
            free = [entry for entry in free if entry not in pending.values()]
            held = [entry for slab in slabs for entry in arena.held_in(slab) if entry not in pending]
            n = min(3, len(held), len(free))
            if n:
                compactor._move(size.name, self.chance.sample(held, n), self.chance.sample(free, n))

    def _push_out(self) -> None:
        cache, tiers = self.core.scheduler.prefixes.cache, self.core.scheduler.prefixes.tiers
        if tiers is not None:
            tiers.push_down()
        if cache is not None:
            cache.evict_all()

    def _running(self) -> bool:
        return any(id_ in self.core.requests for id_ in self._case_of)

    def _add_case(self, place: int) -> None:
        case = self.cases[place]
        priority = self.chance.randrange(3) if self.way.shuffled else 0
        id_ = self.core.add(case.prompt, case.params, priority=priority)
        self._case_of[id_] = place
        self.outputs[place] = self.core.requests[id_].output

    def _add_other(self, length: int, priority: int = 0, max_tokens: int = 24) -> str:
        vocab = self.core.spec.vocab_size
        prompt = [self.chance.randrange(vocab) for _ in range(length)]
        params = SamplingParams(temperature=1.0, max_tokens=max_tokens, seed=self.chance.randrange(1000))
        return self.core.add(prompt, params, priority=priority)

    def _mates_come_and_go(self) -> None:
        self._mates = [id_ for id_ in self._mates if id_ in self.core.requests]
        if self._mates_to_come and self.chance.random() < 0.3 and len(self._mates) < 4:
            self._mates_to_come -= 1
            length = self.chance.choice([1, 2, 3, 4, self.chance.randrange(5, 70)])
            self._mates.append(self._add_other(min(length, self.longest - 1), self.chance.randrange(3)))
        if self._mates and self.chance.random() < 0.15:
            self.core.abort(self._mates.pop(self.chance.randrange(len(self._mates))))

    def _note_preemptions(self) -> None:
        for id_, place in self._case_of.items():
            in_flight = self.core.requests.get(id_)
            if in_flight is not None:
                now = [
                    self.core.scheduler.requests[i].preemptions
                    for i in in_flight.completions
                    if i in self.core.scheduler.requests
                ]
                self.preemptions[place] = max([self.preemptions[place], *now])


def cold_tokens(folder: Path, cases: Sequence[Case], forks: int = 3) -> dict[tuple[int, int], list[int]]:
    """Tokens of every random case run cold, for each fork: fork i draws from the stream of seed + i."""
    random_places = [place for place, case in enumerate(cases) if case.params.temperature != 0]
    singles = [
        Case(cases[place].prompt, replace(cases[place].params, n=1, seed=cases[place].params.seed + fork))
        for place in random_places
        for fork in range(forks)
    ]
    if not singles:
        return {}
    results = iter(run(folder, singles, COLD).outputs)
    return {
        (place, fork): next(results).outputs[0].token_ids for place in random_places for fork in range(forks)
    }


def tokens_of(length: int, seed: int, vocab: int) -> list[int]:
    """T(n, seed) of cases.md."""
    chance = random.Random(f"{length} {seed}")
    return [chance.randrange(vocab) for _ in range(length)]
