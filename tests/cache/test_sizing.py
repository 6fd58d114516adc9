from __future__ import annotations

import random
import time
from statistics import median

import pytest

from denim.cache.node import as_tokens
from denim.cache.positions import GENERATION_END
from denim.cache.prefix_cache import Namespace
from denim.cache.sizing import block_tokens, describe_cache, open_cache, prefill_curve, why_never
from denim.ledger.flops import prefill_flops
from denim.memory.arena import Arena
from denim.memory.layout import PAGE, SLOT, ArenaLayout
from denim.spec.reader import read_spec
from tests.cache.memory import Clock
from tests.memory.layouts import make_layout
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


def test_time_in_the_tree_does_not_grow_with_its_nodes() -> None:
    """Of match, save and evict behind 32k tokens and 500 nodes: 10,000 nodes beside them cost next to
    nothing. Looking at each would make ten times of it."""
    assert request_seconds(leaves=9500) < 3 * request_seconds(leaves=1000)


def request_seconds(leaves: int) -> float:
    """Median of the processor's time for one request behind a path of 32k tokens from which `leaves` branch
    off: found, begun, saved, one evicted, ended."""
    chance = random.Random(0)
    arena = Arena(LAYOUT, 40_000)
    clock = Clock()
    cache = open_cache(SPEC, arena, arena.can_alloc, "auto", segment=8192, now=clock)
    pages = arena.alloc_many(PAGE, 2048 + 8)
    path = as_tokens([chance.randrange(1000) for _ in range(32_768)])

    def ask(tokens: list[int], evict: bool = False) -> float:
        slot = arena.alloc(SLOT)
        arena.commit(slot, len(tokens))
        begin = time.thread_time()
        lease = cache.begin(cache.find(Namespace(), tokens), tokens)
        assert cache.save(Namespace(), tokens, pages, slot, GENERATION_END, lease)
        if evict:
            cache.evict(cache.order.victim(None))
        cache.end(lease)
        return time.thread_time() - begin

    for i in range(leaves):  # at 500 different places of the path
        ask(path[: 1 + (i * 13) % 500] + as_tokens([2000 + i] * 20))
        clock.now += 1
    ask(path)
    assert sum(1 for _ in cache.tree.nodes()) > leaves
    seconds = median(ask(path + as_tokens([20_000 + i] * 100), evict=True) for i in range(41))
    cache.check()
    return seconds
