"""How much of a trace a prefix cache reuses, by its memory.

Owns the curve: the real tree, policy and order of eviction run over the trace without a model
(`denim.cache.replay`), once for each size. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from denim.cache.byte_arena import ByteArena
from denim.cache.replay import Clock, TraceRequest, replay
from denim.cache.sizing import open_cache
from denim.memory.layout import PAGE, SLOT, ArenaLayout, SizeClass
from denim.spec.model import ModelSpec

COARSE_PAGE = 256
"""Tokens of a page in the replay: hits are exact whatever its size, and few pages are quick to count."""


class CurvePoint(NamedTuple):
    """With `memory_bytes` for what is cached and what runs: shares of the prompts' tokens and FLOPs that were
    reused, and checkpoints that were evicted."""

    memory_bytes: int
    token_hit_rate: float
    flop_hit_rate: float
    evicted: int


def hit_curve(
    spec: ModelSpec,
    layout: ArenaLayout,
    trace: Iterable[TraceRequest],
    sizes: Sequence[int],
    segment: int,
    policy: str = "auto",
) -> list[CurvePoint]:
    """One point for each of `sizes` in bytes. `trace` is gone through once for each. `segment`: as in
    `open_cache`."""
    return [_point(spec, _coarse(layout), trace, size, segment, policy) for size in sizes]


def _point(
    spec: ModelSpec, layout: ArenaLayout, trace: Iterable[TraceRequest], size: int, segment: int, policy: str
) -> CurvePoint:
    arena: Any = ByteArena(layout, size)
    clock = Clock()
    cache = open_cache(spec, arena, arena.can_alloc, policy, segment, now=clock)
    replay(trace, cache, arena, clock)
    account = cache.account
    return CurvePoint(
        size,
        account.hit_tokens / account.query_tokens,
        account.hit_flops / account.query_flops,
        account.evicted,
    )


def _coarse(layout: ArenaLayout) -> ArenaLayout:
    """The layout with pages of `COARSE_PAGE` tokens and as many bytes a token."""
    sizes = []
    for size in layout.classes:
        stride = size.stride * COARSE_PAGE // layout.page_size if size.name == PAGE else size.stride
        sizes.append(SizeClass(size.name, stride, stride, 1))
    assert {size.name for size in sizes} <= {PAGE, SLOT}
    return ArenaLayout(COARSE_PAGE, layout.slab_bytes, tuple(sizes), (), ())
