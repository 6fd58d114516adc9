"""How much of a trace a prefix cache reuses, by its memory.

Owns the curve: the real tree, policy and order of eviction run over the trace without a model
(`denim.cache.replay`), once for each size. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Protocol

from denim.cache.byte_arena import ByteArena
from denim.cache.replay import Clock, Reused, TraceRequest, replay
from denim.cache.sizing import open_cache, prefill_curve
from denim.memory.layout import PAGE, SLOT, ArenaLayout, SizeClass
from denim.spec.model import ModelSpec

COARSE_PAGE = 64
"""Tokens of a page in the replay: hits are exact whatever its size, and few pages are quick to count. With 64
the rates are those of 16 to a tenth of a point."""

AT_ONCE = 2
"""Sizes that run at once, each in a process of its own: few machines have fewer cores."""

WORTH_PROCESSES = 1000
"""Requests from which on starting them is worth it."""

TAIL = 0.95


class Trace(Protocol):
    """Requests in the order of their arrival, which may be made anew each time that they are gone through."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[TraceRequest]: ...


class CurvePoint(NamedTuple):
    """With `memory_bytes` for what is cached and what runs: shares of the prompts' tokens and FLOPs that were
    reused, checkpoints that were evicted, and of the requests in the order of the FLOPs that are left to
    compute the one that 95% do not exceed: its prompt, and how much of that was reused."""

    memory_bytes: int
    token_hit_rate: float
    flop_hit_rate: float
    evicted: int
    tail: Reused


def hit_curve(
    spec: ModelSpec,
    layout: ArenaLayout,
    trace: Trace,
    sizes: Sequence[int],
    segment: int,
) -> list[CurvePoint]:
    """One point for each of `sizes` in bytes, with policy "auto". `trace` is gone through once for each.
    `segment`: as in `open_cache`."""
    point = partial(_point, spec, _coarse(layout), trace, segment)
    if len(trace) < WORTH_PROCESSES:
        return [point(size) for size in sizes]
    with ProcessPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(point, sizes))


def _point(
    spec: ModelSpec, layout: ArenaLayout, trace: Iterable[TraceRequest], segment: int, size: int
) -> CurvePoint:
    arena: Any = ByteArena(layout, size)
    clock = Clock()
    cache = open_cache(spec, arena, arena.can_alloc, "auto", segment, now=clock)
    reused = replay(trace, cache, arena, clock)
    flops = prefill_curve(spec)
    reused.sort(key=lambda one: flops(one.prompt) - flops(one.position))
    account = cache.account
    return CurvePoint(
        size,
        account.hit_tokens / account.query_tokens,
        account.hit_flops / account.query_flops,
        account.evicted,
        reused[min(len(reused) - 1, int(TAIL * len(reused)))],
    )


def _coarse(layout: ArenaLayout) -> ArenaLayout:
    """The layout with pages of `COARSE_PAGE` tokens and as many bytes a token."""
    sizes = []
    for size in layout.classes:
        stride = size.stride * COARSE_PAGE // layout.page_size if size.name == PAGE else size.stride
        sizes.append(SizeClass(size.name, stride, stride, 1))
    assert {size.name for size in sizes} <= {PAGE, SLOT}
    return ArenaLayout(COARSE_PAGE, layout.slab_bytes, tuple(sizes), (), ())
