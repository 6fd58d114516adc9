"""Writes recorded updates into the states of whole slots, all layers, before anyone reads such a slot whole.

Owns which layers have rings. How many records a slot has its tag says; must not know why it is read.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from denim.memory.storage import Storage
from denim.recurrence import deferred
from denim.recurrence.backend import TRITON, rule_backend
from denim.recurrence.deferred import Ring
from denim.spec.mixers import RECORD_ROLES


def flush_slots(storage: Storage, pending: Mapping[int, int]) -> None:
    """`pending`: slot -> its records. Does not wait for the device."""
    device = storage.buffer.device
    flush = deferred.flush
    if rule_backend(device.type) == TRITON:
        from denim.recurrence.kernels.flush_ring import flush
    slots = torch.tensor(list(pending), dtype=torch.int64)
    counts = torch.tensor(list(pending.values()), dtype=torch.int32)
    if device.type == "cuda":
        slots, counts = (part.pin_memory().to(device, non_blocking=True) for part in (slots, counts))
    for layer in [place.layer for place in storage.layout.slot_tensors if place.role == RECORD_ROLES[0]]:
        ring = Ring(*(storage.state(layer, role) for role in RECORD_ROLES))
        flush(storage.state(layer, "recurrent"), ring, slots, counts)
