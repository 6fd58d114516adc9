"""The plan against its own layout, and against what an engine then really holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from denim import LLM, CapacityError, ConfigError, SamplingParams
from denim.ledger.devices import find_device
from denim.ledger.lengths import Lengths
from denim.memory.capacity_plan import CapacityPlan
from denim.memory.fit import requests_that_fit
from denim.memory.layout import PAGE, SLOT
from denim.memory.plan_json import plan_json
from denim.spec import embedded_model, read_spec
from denim.spec.published import FOLDER as CONFIGS
from tests.spec.configs import qwen3_5_0_8b

KIB, MIB, GIB = 2**10, 2**20, 2**30
H200 = find_device("H200")


def test_a_short_request_of_qwen3_5_0_8b_is_19_8_mib() -> None:
    """By the token; 0.1 more in pages of 16 tokens, and 0.1 that a slot leaves of its slab."""
    plan = CapacityPlan.of(read_spec(qwen3_5_0_8b()), H200, memory=60 * GIB)
    assert round(plan.ledger.hybrid_bytes(100) / MIB, 1) == 19.8
    assert plan.layout.request_bytes(100) == 100 * 192 * KIB + 7 * 192 * KIB
    assert plan.holding(Lengths.fixed(100)).requests == 60 * GIB // (100 * 192 * KIB) * 100 // 107


def test_the_counts_are_exact() -> None:
    """One request more of the same mix needs a slab that is not there."""
    plan = CapacityPlan.of(read_spec(qwen3_5_0_8b()), H200, memory=GIB)
    lengths = Lengths("mix", (100, 900, 5000), (100, 900, 5000))
    holding = plan.holding(lengths)
    pages = lengths.mean_blocks(16)
    for extra, fits in ((0, True), (1, False)):
        n = holding.requests + extra
        slabs = plan.layout.slabs_for({SLOT: n, PAGE: -(-n * pages.numerator // pages.denominator)})
        assert (slabs <= plan.num_slabs) is fits
    assert holding.entries[SLOT] == holding.requests
    assert holding.state_bytes + holding.kv_bytes + holding.rest_bytes == plan.arena_bytes
    assert 0 <= holding.rest_bytes < 2 * plan.layout.slab_bytes + plan.layout.request_bytes(2000)
    fixed = plan.holding(Lengths.fixed(900))
    assert fixed.requests == requests_that_fit(plan.layout, plan.num_slabs, 900)


def test_a_cache_holds_what_runs_not() -> None:
    plan = CapacityPlan.of(read_spec(qwen3_5_0_8b()), H200)
    holding = plan.holding(Lengths.fixed(1000))
    assert holding.conversations == holding.requests > 256 == holding.running
    assert holding.conversations_beside == holding.requests - 256


def test_the_arena_is_what_an_engine_takes_of_the_device() -> None:
    spec = read_spec(qwen3_5_0_8b())
    plan = CapacityPlan.of(spec, H200)
    left = 0.9 * H200.memory_bytes - plan.weight_bytes - plan.working_bytes
    assert left - plan.layout.slab_bytes < plan.arena_bytes <= left
    two = CapacityPlan.of(spec, H200, devices=2)
    assert two.weight_bytes < 0.52 * plan.weight_bytes
    short = Lengths.fixed(100)
    assert two.holding(short).requests == pytest.approx(2 * plan.holding(short).requests, rel=0.05)


def test_drafts_take_room_for_records_and_for_the_mtp_heads_kv() -> None:
    spec = read_spec(qwen3_5_0_8b())
    plain, drafting = (CapacityPlan.of(spec, H200, memory=GIB, drafts=k) for k in (0, 3))
    assert drafting.drafts is not None
    slots = [plan.layout.size_class(SLOT) for plan in (plain, drafting)]
    assert slots[1].entry_bytes - slots[0].entry_bytes == drafting.drafts.records_bytes
    pages = [plan.layout.size_class(PAGE) for plan in (plain, drafting)]
    assert pages[1].entry_bytes - pages[0].entry_bytes == 16 * 2 * KIB
    for size in drafting.layout.classes:
        assert size.stride * size.count == drafting.layout.slab_bytes
        assert size.entry_bytes <= size.stride


def test_what_cannot_be_is_refused() -> None:
    spec = read_spec(CONFIGS / "qwen3_next_80b_a3b.json")
    with pytest.raises(CapacityError, match=r"H200 with 140 GiB has no room .* 15\d GiB of weights"):
        CapacityPlan.of(spec, H200)
    with pytest.raises(CapacityError, match="too little for one request"):
        CapacityPlan.of(spec, H200, memory=MIB)
    for drafts in (-1, 2048, 10**20):
        with pytest.raises(ConfigError, match=f"--drafts is {drafts}; .* less than 2,048"):
            CapacityPlan.of(spec, H200, drafts=drafts)
    plan = CapacityPlan.of(read_spec(qwen3_5_0_8b()), H200, memory=64 * MIB)
    assert plan.longest_request == (64 * MIB // plan.layout.slab_bytes - 1) * 100 * 16
    with pytest.raises(ConfigError, match=f"9,999 tokens.*at most {plan.longest_request:,}"):
        plan.holding(Lengths.fixed(9999))
    mixed = plan.holding(Lengths("mix", (10, 9999), (10, 9999)))
    assert (mixed.left_out, mixed.lengths.totals) == (1, (10,))


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_every_published_config_has_a_plan(path: Path, drafts: int) -> None:
    """States alone, KV of any kind, both side by side: the plan and the peers' rules cover them.

    1008 tokens fill pages of 16: nobody could hold more. Not all that vLLM needs for drafts is known.
    """
    spec = read_spec(path)
    plan = CapacityPlan.of(spec, H200, memory=16 * GIB, devices=2, drafts=drafts)
    values = json.loads(json.dumps(plan_json(spec, plan, [Lengths.fixed(1008)], compare=True)))
    row = values["workloads"][0]
    assert row["requests"] > 0
    assert row["decode"][0]["seconds"] > 0
    vllm, *sglang = row["peers"]
    assert [peer["name"] for peer in row["peers"]] == ["vLLM 0.33.0"] + ["SGLang 0.5.23"] * (
        2 if spec.linear_layers else 1
    )
    assert vllm["requests"] <= row["requests"] or drafts
    assert sglang[-1]["requests"] <= sglang[0]["requests"] <= row["requests"]


@pytest.mark.parametrize("memory", [8 * MIB, 13 * MIB])
def test_an_engine_holds_what_was_planned(memory: int) -> None:
    """As many requests of 100 tokens as the plan says, from half their length to the whole at once, none of
    them ever without its memory; bytes at their longest as planned. With one request more, one gives way."""
    plan = CapacityPlan.of(read_spec(embedded_model()), find_device("CPU"), memory=memory)
    holding = plan.holding(Lengths.fixed(100))
    assert holding.requests > 10
    held, running, preempted = drive_to_the_edge(memory, holding.requests)
    assert (running, preempted) == (holding.requests, 0)
    assert held == pytest.approx(holding.state_bytes + holding.kv_bytes, rel=0.01)
    running, preempted = drive_to_the_edge(memory, holding.requests + 1)[1:]
    assert running == holding.requests
    assert preempted > 0


def drive_to_the_edge(memory: int, requests: int) -> tuple[int, int, int]:
    """(bytes held, requests running, preemptions) in the step before the first of so many requests ends."""
    llm = LLM(memory=memory, max_num_seqs=requests, debug=True)
    core = llm.core
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    for seed in range(requests):
        core.add([seed + token for token in range(1, 51)], params)
    while True:
        stats = core.stats()
        if any(delta.finish_reason for delta in core.step()):
            break
    layout = core.layout
    held = sum(stats[f"{name}s"]["used"] * layout.size_class(name).stride for name in (PAGE, SLOT))
    return held, stats["running"], stats["preempted_swap"] + stats["preempted_recompute"]
