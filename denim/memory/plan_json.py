"""A capacity plan and all that follows from it as plain JSON values, for `denim plan --json` and its table.

Owns the keys: they stay, more may follow. Computes nothing that the plan, the floors or the peers' rules do
not already say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from denim.ledger.fp8_blocks import fp8_saving
from denim.ledger.lengths import Lengths
from denim.ledger.parameters import count_parameters
from denim.ledger.peers import (
    NOT_SERVED,
    SGLANG,
    SGLANG_RATIO,
    SGLANG_RESERVED,
    VLLM,
    SglangLayout,
    VllmLayout,
)
from denim.ledger.step_floor import StepFloor, decode_floor, prefill_floor
from denim.memory.capacity_plan import CapacityPlan, Holding
from denim.memory.layout import PAGE, SLOT
from denim.spec.model import ModelSpec

BATCHES = (1, 32, 256)
"""Decode batches whose floor is shown, and beside them as many requests as fit."""


def plan_json(
    model: ModelSpec, plan: CapacityPlan, workloads: Sequence[Lengths], compare: bool
) -> dict[str, Any]:
    """The plan of `model` for each of `workloads`; `compare` adds the peers. Bytes and seconds, a device's.

    Raises ConfigError when a workload has no request that is short enough.
    """
    ledger, layout, device = plan.ledger, plan.layout, plan.device
    return {
        "family": model.family,
        "layers": model.pattern,
        "parameters": count_parameters(model).total,
        "dtype": model.dtype,
        "kv_dtype": plan.kv_dtype,
        "state_dtype": model.state_dtype,
        "device": {
            "name": device.name,
            "memory_bytes": device.memory_bytes,
            "bandwidth": device.bandwidth,
            "vendor_bandwidth": device.vendor_bandwidth,
            "flops": device.flops,
            "vendor_flops": device.vendor_flops,
            "sources": list(device.sources),
        },
        "weight_bytes": plan.weight_bytes,
        "fp8_blocks": plan.device.fp8_blocks and fp8_saving(model) > 0,
        "working_bytes": plan.working_bytes,
        "arena_bytes": plan.arena_bytes,
        "slab_bytes": layout.slab_bytes,
        "num_slabs": plan.num_slabs,
        "page_size": layout.page_size,
        "page_bytes": layout.size_class(PAGE).entry_bytes if layout.has(PAGE) else 0,
        "slot_bytes": layout.size_class(SLOT).entry_bytes if layout.has(SLOT) else 0,
        "host_bytes": plan.host_bytes,
        "checkpoint_dtype": plan.form.dtype,
        "stored_slot_bytes": plan.form.slot_bytes,
        "kv_bytes_per_token": ledger.kv_bytes_per_token,
        "state_bytes": ledger.state_bytes,
        "conv_bytes": ledger.conv_bytes,
        "bytes_per_request": ledger.bytes_per_request,
        "checkpoint_equals_kv_of_tokens": ledger.checkpoint_equals_kv_of_tokens,
        "crossover_tokens": ledger.crossover_tokens,
        "longest_request": plan.longest_request,
        "drafts": None if plan.drafts is None else plan.drafts._asdict(),
        "workloads": [_workload(plan, plan.holding(lengths), compare) for lengths in workloads],
    }


def _workload(plan: CapacityPlan, holding: Holding, compare: bool) -> dict[str, Any]:
    lengths = holding.lengths
    mean_prompt = max(1, round(lengths.mean_prompt))
    batches = sorted({n for n in BATCHES if n < holding.requests} | {holding.requests})
    decode = [decode_floor(plan.spec, plan.ledger, plan.device, lengths.mean_tokens, n) for n in batches if n]
    values = {
        "name": lengths.name,
        "mean_prompt_tokens": lengths.mean_prompt,
        "mean_tokens": lengths.mean_tokens,
        "lengths": len(lengths.totals) + holding.left_out,
        "left_out": holding.left_out,
        "requests": holding.requests,
        "slots": holding.entries.get(SLOT, 0),
        "pages": holding.entries.get(PAGE, 0),
        "state_bytes": holding.state_bytes,
        "kv_bytes": holding.kv_bytes,
        "rest_bytes": holding.rest_bytes,
        "conversations": holding.conversations,
        "running": holding.running,
        "conversations_beside": holding.conversations_beside,
        "conversations_on_host": holding.conversations_on_host,
        "decode": [_floor(floor) for floor in decode],
        "prefill": _floor(prefill_floor(plan.spec, plan.ledger, plan.device, mean_prompt, plan.chunk)),
    }
    if compare:
        values["peers"] = _peers(plan, holding)
    return values


def _floor(floor: StepFloor) -> dict[str, Any]:
    per_token = {
        "seconds_per_token": floor.seconds_per_token,
        "bytes_per_token": floor.moved_bytes / floor.tokens,
        "flops_per_token": floor.flops / floor.tokens,
    }
    return floor._asdict() | per_token


def _peers(plan: CapacityPlan, holding: Holding) -> list[dict[str, Any]]:
    spec, lengths = plan.spec, holding.lengths
    mean = max(1, round(lengths.mean_tokens))
    k = plan.drafts.drafts if plan.drafts else 0
    vllm = VllmLayout.of(spec, plan.kv_dtype, k)
    parts = [f"blocks of {vllm.block_tokens} tokens"] if vllm.kv_groups else []
    parts += [f"state blocks: {vllm.state_blocks}"] if vllm.state_blocks else []
    each = f" ({vllm.state_sets} a group)" if k and vllm.state_sets else ""
    rows: list[tuple[str, str, VllmLayout | SglangLayout]] = [(VLLM, ", ".join(parts) + each, vllm)]
    for slots in SGLANG_RESERVED if plan.ledger.bytes_per_request else SGLANG_RESERVED[:1]:
        sglang = SglangLayout.of(spec, plan.kv_dtype, k, slots)
        parts = (
            [f"states : KV = {SGLANG_RATIO} : 1"] if vllm.kv_groups and vllm.state_blocks else ["one pool"]
        )
        if vllm.state_blocks:
            parts.append(f"{slots} slots a request" + (f" and {k} for drafts" if k else ""))
        rows.append((SGLANG, ", ".join(parts), sglang))
    return [
        {
            "name": name,
            "rule": rule,
            "served": spec.family not in NOT_SERVED[name],
            "request_bytes": layout.request_bytes(mean),
            "requests": layout.requests(plan.arena_bytes, lengths),
        }
        for name, rule, layout in rows
    ]
