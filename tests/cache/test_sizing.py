from __future__ import annotations

import random
import time

import pytest

from denim.cache.node import as_tokens
from denim.cache.positions import GENERATION_END
from denim.cache.prefix_cache import Namespace, PrefixCache
from denim.cache.sizing import block_tokens, describe_cache, open_cache, prefill_curve, why_never
from denim.ledger.flops import prefill_flops
from denim.memory.arena import Arena
from denim.memory.layout import PAGE, SLOT, ArenaLayout
from denim.spec.reader import read_spec
from tests.cache.memory import Clock, make_layout
from tests.spec.configs import qwen3_5_0_8b

SPEC = read_spec(qwen3_5_0_8b(), dtype="bfloat16")
LAYOUT = ArenaLayout.of(SPEC, 16)


@pytest.mark.parametrize("tokens", [64, 1000, 30_000, 200_000])
def test_the_curve_is_the_ledger_s(tokens: int) -> None:
    head = 2 * SPEC.hidden_size * SPEC.vocab_size
    exact = prefill_flops(SPEC, tokens) - head
    assert prefill_curve(SPEC)(tokens) == pytest.approx(exact, rel=1e-3)


def test_a_block_weighs_as_much_as_a_checkpoint() -> None:
    block = block_tokens(LAYOUT, 64)
    kv, state = (LAYOUT.size_class(name).stride for name in (PAGE, SLOT))
    assert block % 64 == 0 and 0 <= block // 16 * kv - state < 4 * kv
    assert block_tokens(make_layout(pages=0), 64) == block_tokens(make_layout(slots=0), 64) == 64


def test_the_start_up_line() -> None:
    line = describe_cache(LAYOUT, 1000, "auto", 32768)
    assert line.startswith("prefix cache (auto): holds ") and line.endswith(" of 8,192 tokens")
    assert describe_cache(LAYOUT, 1000, "auto", 100).endswith(" of 100 tokens")
    assert "not reused" in describe_cache(LAYOUT, 1000, "none", 100)


def test_why_there_can_never_be_a_hit() -> None:
    """PN-01: said at the start, with what to change."""
    block = block_tokens(LAYOUT, 64)

    def why(slabs: int, policy: str, longest: int = 4096) -> str | None:
        return why_never(LAYOUT, slabs, policy, 64, longest)

    assert why(3, "auto") is None and why(2, "none") is None
    assert "raise memory" in str(why(2, "auto")) and "raise memory" in str(why(3, "all"))
    assert why(10, "all") is None
    assert f"every {block:,} tokens" in str(why(100, "align", block)) and "'auto'" in str(
        why(100, "all", block)
    )
    assert why(100, "align", block + 1) is None and why(100, "ends", 2) is None


def test_time_in_the_tree_at_32k_tokens_and_10_000_nodes() -> None:
    """Match, save and evict take under a millisecond a request; a wide margin is left to a busy machine."""
    layout = LAYOUT
    chance = random.Random(0)
    arena = Arena(layout, 40_000)
    clock = Clock()
    cache = open_cache(SPEC, arena, arena.can_alloc, "auto", segment=8192, now=clock)
    pages = arena.alloc_many(PAGE, 2048 + 8)
    long = as_tokens([chance.randrange(1000) for _ in range(32_768)])

    def save(tokens: list[int]) -> None:
        slot = arena.alloc(SLOT)
        arena.commit(slot, len(tokens))
        lease = cache.begin(cache.find(Namespace(), tokens), tokens)
        assert cache.save(Namespace(), tokens, pages, slot, GENERATION_END, lease)
        cache.end(lease)

    for i in range(9500):  # each a leaf, at 500 different places of one path
        save(long[: 1 + (i * 13) % 500] + as_tokens([2000 + i] * 20))
        clock.now += 1
    save(long)
    assert sum(1 for _ in cache.tree.nodes()) >= 10_000
    assert request_seconds(cache, arena, long, pages) < 5e-3
    cache.check()


def request_seconds(cache: PrefixCache, arena: Arena, head: list[int], pages: list[int]) -> float:
    """Median of what a request behind `head` spends in the cache: found, begun, saved, one evicted, ended."""
    times = []
    for i in range(41):
        tokens = head + as_tokens([9000 + i] * 100)
        slot = arena.alloc(SLOT)
        arena.commit(slot, len(tokens))
        begin = time.perf_counter()
        hit = cache.find(Namespace(), tokens)
        lease = cache.begin(hit, tokens)
        cache.save(Namespace(), tokens, pages, slot, GENERATION_END, lease)
        cache.evict(cache.order.victim(None))
        cache.end(lease)
        times.append(time.perf_counter() - begin)
        assert hit.position == len(head)
    return sorted(times)[len(times) // 2]
