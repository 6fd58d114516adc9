"""A trace of requests through the real cache, without a model: what would be reused with so much memory.

Owns the order in which one request touches the cache, which is that of the engine: match, make room, save on
the way, leave the end behind. Requests run one after the other and take no time; tens of thousands of them
take seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from denim.cache.node import Tokens
from denim.cache.positions import GENERATION_END, Sighting
from denim.cache.prefix_cache import Namespace, PrefixCache
from denim.memory.arena import Arena
from denim.memory.layout import PAGE, SLOT


@dataclass(frozen=True)
class TraceRequest:
    """`time` in seconds; `tokens` of prompt and answer, of which the first `prompt` are the prompt."""

    time: float
    tokens: Tokens
    prompt: int


class Clock:
    """The trace's time, for whoever asks while it is replayed."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Reused(NamedTuple):
    """Of one request: tokens of its prompt, and how many of them were reused."""

    prompt: int
    position: int


def replay(trace: Iterable[TraceRequest], cache: PrefixCache, arena: Arena, clock: Clock) -> list[Reused]:
    """Run every request of `trace`, in order, against `cache`, whose account then says what came of it."""
    reused = []
    for request in trace:
        clock.now = request.time
        reused.append(Reused(request.prompt, _replay_one(request, cache, arena)))
    return reused


def _replay_one(request: TraceRequest, cache: PrefixCache, arena: Arena) -> int:
    namespace = Namespace()
    prompt = request.tokens[: request.prompt]
    page_size, has_pages = arena.layout.page_size, arena.layout.has(PAGE)
    hit = cache.find(namespace, prompt)
    while True:
        full = len(hit.pages) - hit.partial
        need = {SLOT: 1} if arena.layout.has(SLOT) else {}
        if has_pages:
            need[PAGE] = -(-len(request.tokens) // page_size) - full
        if has_pages:
            arena.share(PAGE, hit.pages)
        fits = cache.make_room(need, keep=hit.node)
        if fits or hit.node is None:
            break
        if has_pages:
            arena.release(PAGE, hit.pages)
        cache.evict(hit.node)
        hit = cache.find(namespace, prompt)
    lease = cache.begin(hit, prompt)
    if not fits:  # a request larger than the whole arena
        cache.end(lease)
        return 0
    shared, copied = hit.pages[:full], hit.pages[full:]
    own = arena.alloc_many(PAGE, need[PAGE]) if has_pages else []
    slot = arena.alloc(SLOT) if SLOT in need else -1
    assert own is not None and slot is not None
    if copied:
        arena.release(PAGE, copied)
    pages = shared + own
    sighting = Sighting(len(prompt), hit.position, hit.seen)
    for position, kind in cache.wanted(sighting):
        head = prompt[:position]
        place = cache.reserve(namespace, head, kind) if slot >= 0 else -1
        if place is not None:
            if place >= 0:
                arena.commit(place, position)
            taken = cache.save(namespace, head, pages, place, kind, lease)
            assert taken is not None or place < 0, "reserved, but not taken"
    applied = request.tokens[:-1]  # the last token was drawn, and never applied
    kept = None
    if cache.policy.generation_end:
        if slot >= 0:
            arena.commit(slot, len(applied))
        kept = cache.save(namespace, applied, pages, slot, GENERATION_END, lease)
    cache.remember(namespace, request.tokens, lease)
    if slot >= 0 and kept is None:
        arena.release(SLOT, [slot])
    if pages:
        arena.release(PAGE, pages)
    cache.end(lease)
    return hit.position
