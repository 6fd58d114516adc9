"""Pools under the three rules: they hold what the rules say, and are full where the rules stop."""

from __future__ import annotations

import pytest

from denim.ledger.devices import find_device
from denim.ledger.lengths import Lengths
from denim.ledger.peers import SglangLayout, VllmLayout
from denim.memory.capacity_plan import CapacityPlan
from denim.memory.filling import Pool, arena_filling, sglang_filling, vllm_filling
from denim.spec import read_spec
from denim.spec.published import published_configs

NAMES = ("Qwen3.5-0.8B", "Kimi-Linear-48B-A3B", "Mamba2-2.7B", "Granite-4.0-Micro", "Falcon-H1-0.5B")
LENGTHS = (Lengths.fixed(4096), Lengths.lognormal(1000, 1.2))


def used(pool: Pool) -> float:
    return pool.states + pool.kv + pool.idle


@pytest.fixture(params=NAMES)
def plan(request: pytest.FixtureRequest) -> CapacityPlan:
    return CapacityPlan.of(read_spec(published_configs()[request.param]), find_device("H200"))


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: lengths.name)
def test_full_at_capacity_and_too_small_for_one_more(plan: CapacityPlan, lengths: Lengths) -> None:
    kept = lengths.within(plan.longest_request)
    vllm = VllmLayout.of(plan.spec)
    sglang = SglangLayout.of(plan.spec, "auto", 0, 4)
    rules = [
        (lambda n: arena_filling(plan, kept, n), plan.holding(kept).requests, plan.layout.slab_bytes),
        (
            lambda n: vllm_filling(plan, vllm, kept, n),
            vllm.requests(plan.arena_bytes, kept),
            vllm.block_bytes,
        ),
        (lambda n: sglang_filling(plan, sglang, kept, n), sglang.requests(plan.arena_bytes, kept), 1),
    ]
    for filling, capacity, grain in rules:
        pools = filling(capacity)
        assert sum(pool.size for pool in pools) == pytest.approx(plan.arena_bytes)
        assert all(used(pool) <= pool.size for pool in pools)
        # A page more or less for the last request, and the two kinds of entries round up to a slab each.
        assert any(used(pool) + 2 * grain > pool.size for pool in filling(capacity + 1))
        assert all(part == 0 for pool in filling(0) for part in pool[2:])


def test_states_run_out_while_kv_is_half_empty() -> None:
    """What users of a fixed ratio meet."""
    plan = CapacityPlan.of(read_spec(published_configs()["Qwen3.5-0.8B"]), find_device("H200"))
    rule = SglangLayout.of(plan.spec, "auto", 0, 4)
    states, kv = sglang_filling(plan, rule, Lengths.fixed(4096), 797)
    assert states.name == "states" and used(states) / states.size > 0.99
    assert kv.name == "KV" and used(kv) / kv.size < 0.6


def test_pages_of_other_sizes_hold_the_same_tokens() -> None:
    spec, lengths = read_spec(published_configs()["Qwen3.5-0.8B"]), Lengths.fixed(4095)
    held = {}
    for page in (1, 16, 256):
        plan = CapacityPlan.of(spec, find_device("H200"), page_size=page)
        pool = arena_filling(plan, lengths, 1)[0]
        held[page] = pool.idle
        assert pool.kv == 4095 * plan.ledger.kv_bytes_per_token
    assert held[1] < held[16] + 4096 and held[256] >= 12 * 1024


def test_a_larger_chunk_takes_working_memory_from_the_arena() -> None:
    spec = read_spec(published_configs()["Qwen3.5-0.8B"])
    small, large = (CapacityPlan.of(spec, find_device("H200"), chunk=chunk) for chunk in (64, 256))
    assert large.working_bytes > small.working_bytes
    assert large.arena_bytes < small.arena_bytes
