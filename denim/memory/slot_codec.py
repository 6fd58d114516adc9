"""From a slot to the bytes of a stored checkpoint, and back.

Owns the conversion that `denim.memory.checkpoint_form` lays out. Int8 has a scale for each row of a state
(its last dimension), which puts the row's largest element at 127. Knows tensors; not who asks, or why.
"""

from __future__ import annotations

import torch
from torch import Tensor

from denim.memory.checkpoint_form import SCALE_BYTES, CheckpointForm, StoredTensor

INT8_MAX = 127
TINY = torch.finfo(torch.float32).tiny  # a row that is all zeros stays so


def encode(form: CheckpointForm, slot: Tensor) -> Tensor:
    """uint8 [slot bytes] of the arena -> uint8 [form.slot_bytes], on the same device; a view where nothing is
    converted."""
    if not form.tensors:
        return slot[: form.slot_bytes]
    stored = torch.zeros(form.slot_bytes, dtype=torch.uint8, device=slot.device)
    for tensor in form.tensors:
        state, elements = _in_slot(tensor, slot), _elements(tensor, stored)
        if tensor.scales < 0:
            elements.copy_(state)
            continue
        rows = state.float()
        scales = (rows.abs().amax(-1, keepdim=True) / INT8_MAX).clamp_min(TINY)
        _scales(tensor, stored).copy_(scales)
        elements.copy_((rows / scales).round_())
    return stored


def decode(form: CheckpointForm, stored: Tensor, slot: Tensor) -> None:
    """The other way: writes the tensors of `stored` into `slot`, whose other bytes stay."""
    if not form.tensors:
        slot[: form.slot_bytes].copy_(stored)
        return
    for tensor in form.tensors:
        state, elements = _in_slot(tensor, slot), _elements(tensor, stored)
        if tensor.scales < 0:
            state.copy_(elements)
        else:
            state.copy_(elements.float().mul_(_scales(tensor, stored)))


def _in_slot(tensor: StoredTensor, slot: Tensor) -> Tensor:
    place = tensor.place
    dtype: torch.dtype = getattr(torch, place.dtype)
    return slot[place.offset : place.offset + place.bytes].view(dtype).view(place.shape)


def _elements(tensor: StoredTensor, stored: Tensor) -> Tensor:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    end = tensor.offset + tensor.elements * dtype.itemsize
    return stored[tensor.offset : end].view(dtype).view(tensor.place.shape)


def _scales(tensor: StoredTensor, stored: Tensor) -> Tensor:
    shape = (*tensor.place.shape[:-1], 1)
    end = tensor.scales + SCALE_BYTES * tensor.rows
    return stored[tensor.scales : end].view(torch.float32).view(shape)
