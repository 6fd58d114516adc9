"""What the prefix cache of one model goes by: costs, grids and what memory holds.

Owns the numbers that follow from spec and layout alone, the assembly of a cache from its parts, and the
start-up line. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from denim.cache.eviction import Worth
from denim.cache.expected import Expected
from denim.cache.positions import POLICIES, Grid
from denim.cache.prefix_cache import HasRoom, PrefixCache
from denim.cache.spacing import OverlapDepths
from denim.cache.tier import Tier
from denim.cache.tree import PrefixTree
from denim.ledger.flops import CHUNK, prefill_flops
from denim.ledger.units import plural
from denim.memory.arena import Arena
from denim.memory.checkpoint_form import CheckpointForm
from denim.memory.fit import requests_that_fit
from denim.memory.layout import PAGE, SLOT, ArenaLayout
from denim.spec.model import ModelSpec

CURVE = (4096, 65536)
"""Lengths at which the FLOPs of a prefill are taken; between and beyond them they are a parabola."""

SPACED_EACH = 4
"""In a long prompt one spaced checkpoint for KV that weighs so many times as much: a quarter on top of it."""

IDS_FACTOR = 4
"""Token ids are known for so many times the tokens whose KV the arena could hold, at 4 bytes each."""

SHOWN_LENGTHS = (1024, 8192, 65536)
"""Prefix lengths of the start-up line."""


def prefill_curve(spec: ModelSpec, chunk: int = CHUNK) -> Callable[[int], float]:
    """FLOPs of a prefill from nothing, as a function that costs nothing: a n + b n² through two lengths.

    Exact but for the head and for prompts shorter than a chunk, neither of which a checkpoint saves.
    """
    m, n = CURVE
    head = 2 * spec.hidden_size * spec.vocab_size
    at_m, at_n = ((prefill_flops(spec, tokens, chunk) - head) / tokens for tokens in CURVE)
    square = (at_n - at_m) / (n - m)
    linear = at_m - square * m
    return lambda tokens: tokens * (linear + square * tokens)


def block_tokens(layout: ArenaLayout, chunk: int) -> int:
    """Tokens whose KV weighs as much as a checkpoint, on the chunk grid; a chunk where either is missing."""
    if not layout.has(PAGE) or not layout.has(SLOT):
        return chunk
    page, slot = (layout.size_class(name).stride for name in (PAGE, SLOT))
    tokens = slot * layout.page_size / page
    return max(chunk, -(-int(tokens) // chunk) * chunk)


def open_cache(
    spec: ModelSpec,
    arena: Arena,
    has_room: HasRoom,
    policy: str,
    segment: int,
    chunk: int = CHUNK,
    now: Callable[[], float] = monotonic,
) -> PrefixCache:
    """An empty cache over `arena`. `policy` is a name of `POLICIES`; `segment`: the most tokens that are
    prefilled in one step; `now` gives seconds."""
    layout = arena.layout
    page, slot = layout.stride(PAGE), layout.stride(SLOT)
    slots = arena.num_slabs * (layout.size_class(SLOT).count if layout.has(SLOT) else 1)
    block = block_tokens(layout, chunk)
    tokens = slots * block
    tree = PrefixTree(arena, IDS_FACTOR * tokens)
    flops = prefill_curve(spec, chunk)
    worth = Worth(tree, flops, page, slot)
    grid = Grid(block, segment, chunk, OverlapDepths(SPACED_EACH * block if slot else 0))
    return PrefixCache(arena, tree, Expected(worth, now), POLICIES[policy], grid, flops, has_room)


def open_tier(
    name: str,
    spec: ModelSpec,
    form: CheckpointForm,
    capacity: int,
    on_free: Callable[[list[int]], None],
    chunk: int,
    has_room: HasRoom | None = None,
) -> Tier:
    """An empty lower tier of `capacity` bytes for checkpoints in `form`; the others are those of `Tier`."""
    tokens = IDS_FACTOR * (capacity // form.block_bytes) * (form.page_size if form.page_bytes else chunk)
    return Tier(
        name,
        form.layout(),
        capacity,
        tokens,
        prefill_curve(spec, chunk),
        lambda worth: Expected(worth, monotonic),
        on_free,
        has_room,
    )


def describe_cache(layout: ArenaLayout, num_slabs: int, policy: str, longest: int) -> str:
    """The start-up line: what an otherwise empty arena holds, in prefixes of up to `longest` tokens."""
    if policy == "none":
        return "prefixes are not reused between requests (checkpoint_policy is none)"
    lengths = [tokens for tokens in SHOWN_LENGTHS if tokens <= longest] or [longest]
    fits = {tokens: requests_that_fit(layout, num_slabs, tokens) for tokens in lengths}
    held = ", or ".join(f"{n:,} of {tokens:,} tokens" for tokens, n in fits.items() if n)
    return f"prefix cache ({policy}): holds {held or 'short prefixes'}"


def why_never(layout: ArenaLayout, num_slabs: int, policy: str, chunk: int, longest: int) -> str | None:
    """Why no request of up to `longest` tokens can ever begin from the cache, and what to change; None where
    one can, or where that is as asked for."""
    if policy == "none":
        return None
    shortest = 1 if POLICIES[policy].generation_end else block_tokens(layout, chunk)
    if shortest >= longest:
        return (
            f"checkpoint_policy {policy!r} saves every {shortest:,} tokens, and no request has more than"
            f" {longest:,}; use 'auto', or raise max_model_len"
        )
    pages = -(-shortest // layout.page_size)
    need = {SLOT: 2, PAGE: pages + 1}  # of the checkpoint, and of a request that begins from it
    if layout.slabs_for({size.name: need[size.name] for size in layout.classes}) > num_slabs:
        tokens = f"{shortest:,} {plural('token', shortest)}"
        return f"no checkpoint of {tokens} fits beside a request; raise memory"
    return None
