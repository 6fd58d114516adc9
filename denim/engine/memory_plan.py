"""The layout of the arena and its capacity, with or without rings of recorded updates in the slots.

Owns when decode defers its writes. What that saves and costs in bytes the ledger says, how many requests fit
the capacity plan.
"""

from __future__ import annotations

import logging

import torch

from denim.engine.capacity import Capacity, plan_capacity
from denim.engine.options import EngineOptions
from denim.errors import ConfigError
from denim.ledger.deferred import deferred_cost, ring_length
from denim.memory.layout import ArenaLayout
from denim.recurrence.backend import TRITON, rule_backend
from denim.spec.model import ModelSpec

log = logging.getLogger("denim")

# Decode rows of a step from which recording pays, as measured on an H200 (bench.recurrence, deferred); one
# more than captured shapes have, with prefill and without. A number of steps that is asked for holds in all.
RECORD_FROM, FORCED_FROM = 9, 0


def plan_memory(
    options: EngineOptions, spec: ModelSpec, device: torch.device
) -> tuple[ArenaLayout, Capacity]:
    """The layout and what fits; warns of limits that are less than was asked for. Raises ConfigError where
    writes shall be deferred and no layer can, and CapacityError as `plan_capacity` does."""
    layout, capacity = _chosen(options, spec, device)
    for what in capacity.clamped:
        log.warning(what)
    return layout, capacity


def _chosen(options: EngineOptions, spec: ModelSpec, device: torch.device) -> tuple[ArenaLayout, Capacity]:
    wish = options.deferred_writes
    if wish is not None and wish != "auto":
        assert isinstance(wish, int)
        if deferred_cost(spec, wish) is None:
            raise ConfigError(
                f"deferred_writes={wish}, but no layer of this model can defer its writes; leave it at None"
            )
        return _plan(options, spec, device, wish, FORCED_FROM)
    plain = _plan(options, spec, device)
    fused = rule_backend(device.type, options.recurrence_backend) == TRITON
    length = ring_length(spec)
    if wish is None or not fused or not length or plain[1].max_num_seqs < RECORD_FROM:
        return plain
    ringed = _plan(options, spec, device, length, RECORD_FROM)
    return ringed if ringed[1].max_num_seqs == plain[1].max_num_seqs else plain


def _plan(
    options: EngineOptions, spec: ModelSpec, device: torch.device, records: int = 0, record_from: int = 0
) -> tuple[ArenaLayout, Capacity]:
    layout = ArenaLayout.of(
        spec, options.page_size, options.kept_kv_dtype, records=records, record_from=record_from
    )
    return layout, plan_capacity(options, spec, layout, device)
