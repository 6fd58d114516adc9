"""What fits: the size of the arena, the limits that follow from it, and the start-up line that says so.

Owns the step from options and a device to numbers; everything about sizes is asked of the layout.
Refuses what cannot work before a request comes, and clamps what was only a default or a wish.
"""

from __future__ import annotations

from typing import NamedTuple

import psutil
import torch

from denim.cache.sizing import describe_cache
from denim.engine.options import EngineOptions
from denim.errors import CapacityError
from denim.ledger.budget import (
    DEFAULT_BATCHED_TOKENS,
    DEFAULT_NUM_SEQS,
    DEVICE_SHARE,
    HOST_SHARE,
    working_bytes,
)
from denim.ledger.parameters import weight_bytes
from denim.ledger.units import parse_bytes, size_text
from denim.memory.fit import requests_that_fit
from denim.memory.layout import PAGE, SLOT, ArenaLayout
from denim.models.fp8_kept import can_keep
from denim.spec.model import ModelSpec


class Capacity(NamedTuple):
    """`num_slabs` of the layout make the arena beside so many `weight_bytes`. The others are the limits in
    force; `clamped` says which of them are less than was asked for."""

    num_slabs: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    weight_bytes: int
    clamped: tuple[str, ...]


def plan_capacity(
    options: EngineOptions, spec: ModelSpec, layout: ArenaLayout, device: torch.device
) -> Capacity:
    """Sizes and limits for `device`, on which the weights lie already.

    Raises CapacityError when not one request fits, or when the arena cannot be had.
    """
    batched = options.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS[device.type]
    wanted_seqs = options.max_num_seqs or DEFAULT_NUM_SEQS
    wanted_len = min(options.max_model_len or spec.max_position, spec.max_position)
    clamped = []
    if options.max_model_len and options.max_model_len > spec.max_position:
        clamped.append(
            f"max_model_len={options.max_model_len} is beyond the model's {spec.max_position} positions;"
            f" {spec.max_position} is used"
        )

    enough = layout.slabs_for({name: n * wanted_seqs for name, n in layout.need(wanted_len).items()})
    if options.memory is None or isinstance(options.memory, float):
        budget = _share_of_device(options, spec, batched, wanted_seqs, device)
        if options.memory is None:
            budget = min(budget, enough * layout.slab_bytes)
    else:
        budget = parse_bytes("memory", options.memory)
        _refuse_beyond_device(budget, device)
    num_slabs = layout.num_slabs(budget)

    longest = layout.longest_request(num_slabs)
    max_model_len = wanted_len if longest is None else min(wanted_len, longest)
    if max_model_len < wanted_len:
        need = size_text(layout.slabs_for(layout.need(wanted_len)) * layout.slab_bytes)
        clamped.append(
            f"max_model_len clamped to {max_model_len}: one request of {wanted_len} tokens needs {need},"
            f" the arena has {size_text(num_slabs * layout.slab_bytes)}"
        )
    fitting = requests_that_fit(layout, num_slabs, 1)
    max_num_seqs = min(wanted_seqs, fitting)
    if max_num_seqs < (options.max_num_seqs or 0):
        clamped.append(f"max_num_seqs clamped to {max_num_seqs}, the requests that fit the arena")
    weights = weight_bytes(spec, fp8_blocks=can_keep(spec, device))
    return Capacity(num_slabs, max_model_len, max_num_seqs, batched, weights, tuple(clamped))


def describe(spec: ModelSpec, layout: ArenaLayout, capacity: Capacity, policy: str) -> str:
    """The start-up line: dtypes, the arena, what one request costs, how many of which length fit, and what
    the prefix cache holds with checkpoint policy `policy`."""
    arena = size_text(capacity.num_slabs * layout.slab_bytes)
    cost = []
    if layout.has(SLOT):
        cost.append(f"a slot of {size_text(layout.size_class(SLOT).entry_bytes)}")
    if layout.has(PAGE):
        cost.append(f"{size_text(layout.size_class(PAGE).entry_bytes)} per {layout.page_size} tokens")
    lengths = sorted({min(n, capacity.max_model_len) for n in (512, 4096, capacity.max_model_len)})
    fits = ", ".join(f"{requests_that_fit(layout, capacity.num_slabs, n)} of {n:,} tokens" for n in lengths)
    return (
        f"{size_text(capacity.weight_bytes)} of weights; {_dtypes(spec, layout)}; "
        f"arena {arena} ({capacity.num_slabs} slabs of {size_text(layout.slab_bytes)}); a request costs"
        f" {' + '.join(cost)}; fits {fits}; at most {capacity.max_num_seqs} run at once;"
        f" {describe_cache(layout, capacity.num_slabs, policy, capacity.max_model_len)}"
    )


def _dtypes(spec: ModelSpec, layout: ArenaLayout) -> str:
    kv = {place.dtype for place in layout.page_tensors}
    weights = f"{spec.dtype} weights and KV" if kv == {spec.dtype} else f"{spec.dtype} weights"
    parts = [weights, *(f"{dtype} KV" for dtype in kv - {spec.dtype})]
    if layout.has(SLOT):
        deferred = f" written every {layout.records} steps" if layout.records else ""
        deferred += f" where {layout.record_from} or more decode" if layout.record_from else ""
        parts.append(f"{spec.state_dtype} states{deferred}")
    return ", ".join(parts)


def _share_of_device(
    options: EngineOptions, spec: ModelSpec, batched: int, seqs: int, device: torch.device
) -> int:
    """Bytes for the arena. The share counts the whole device: weights and working memory come out of it."""
    share = options.memory
    assert share is None or isinstance(share, float)
    working = working_bytes(spec, batched, seqs, options.chunk_size)
    if device.type == "cpu":
        if share is None:
            return int(psutil.virtual_memory().available * HOST_SHARE)
        total, used = psutil.virtual_memory().total, psutil.Process().memory_info().rss
    else:
        free, total = torch.cuda.mem_get_info(device)
        share, used = share or DEVICE_SHARE, total - free
    budget = int(total * share) - used - working
    if budget <= 0:
        raise CapacityError(
            f"memory={share} of the {size_text(total)} of {device} leaves nothing for states and KV beside"
            f" {size_text(used)} in use, weights included, and {size_text(working)} of working memory; raise"
            " memory or lower max_num_batched_tokens"
        )
    return budget


def _refuse_beyond_device(budget: int, device: torch.device) -> None:
    on_cpu = device.type == "cpu"
    free = psutil.virtual_memory().available if on_cpu else torch.cuda.mem_get_info(device)[0]
    if budget > free:
        raise CapacityError(
            f"memory={size_text(budget)} is more than the {size_text(free)} free on {device}; lower memory"
        )
