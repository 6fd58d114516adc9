"""How full memory is with so many requests, under Denim's rule and under the peers'.

Owns the pools of each rule and what stands in them. Sizes come from the plan's layout and the peers' layouts;
pure Python: never imports torch.
"""

from __future__ import annotations

from typing import NamedTuple

from denim.ledger.lengths import Lengths
from denim.ledger.peers import SglangLayout, VllmLayout
from denim.memory.capacity_plan import CapacityPlan
from denim.memory.fit import mixture_need
from denim.memory.layout import PAGE, SLOT


class Pool(NamedTuple):
    """Bytes of one pool. `states` and `kv` are of running requests; `idle` is held by them and holds nothing:
    rounding, padding, reserved slots."""

    name: str
    size: float
    states: float
    kv: float
    idle: float


def arena_filling(plan: CapacityPlan, lengths: Lengths, requests: int) -> tuple[Pool, ...]:
    """Denim's one arena; `idle` is the rest of slots and of last pages."""
    layout = plan.layout
    entries = mixture_need(layout, requests, lengths.mean_blocks(layout.page_size))
    held = sum(entries[name] * layout.size_class(name).stride for name in (SLOT, PAGE) if layout.has(name))
    states, kv = _content(plan, lengths, requests)
    return (Pool("arena", plan.arena_bytes, states, kv, max(0.0, held - states - kv)),)


def vllm_filling(plan: CapacityPlan, rule: VllmLayout, lengths: Lengths, requests: int) -> tuple[Pool, ...]:
    """vLLM's one pool of equal blocks; `idle` is what pads states and what last blocks leave over."""
    blocks = rule.kv_groups * float(lengths.mean_blocks(rule.block_tokens)) + rule.state_blocks
    states, kv = _content(plan, lengths, requests)
    idle = requests * blocks * rule.block_bytes - states - kv
    return (Pool("blocks", plan.arena_bytes, states, kv, max(0.0, idle)),)


def sglang_filling(
    plan: CapacityPlan, rule: SglangLayout, lengths: Lengths, requests: int
) -> tuple[Pool, ...]:
    """SGLang's pools of states and of KV; `idle` is what is reserved beside each request's one state. A model
    that has only one of the two has one pool."""
    states, kv = _content(plan, lengths, requests)
    state_pool, kv_pool = rule.pools(plan.arena_bytes)
    idle = requests * (rule.reserved + rule.drafts - 1) * rule.state_bytes
    pools = (Pool("states", state_pool, states, 0, idle), Pool("KV", kv_pool, 0, kv, 0))
    return tuple(pool for pool in pools if pool.size)


def _content(plan: CapacityPlan, lengths: Lengths, requests: int) -> tuple[float, float]:
    """Bytes of states and of KV that so many requests need, nothing rounded."""
    ledger = plan.ledger
    return requests * ledger.bytes_per_request, requests * lengths.mean_tokens * ledger.kv_bytes_per_token
