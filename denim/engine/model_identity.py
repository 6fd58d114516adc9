"""Whose prefixes files hold: short texts for the weights of a model and for the form of its checkpoints.

Owns what makes a stored prefix useless for another engine. Reads a few numbers of every tensor: weights that
were trained on differ in nearly all of theirs.
"""

from __future__ import annotations

import hashlib
from dataclasses import astuple
from typing import Any

import torch

from denim.engine.options import EngineOptions
from denim.memory.checkpoint_form import CheckpointForm
from denim.memory.layout import ArenaLayout
from denim.spec.model import ModelSpec

SAMPLED = 256
"""Numbers of each tensor that are looked at, evenly spread."""

DIGITS = 16
"""Of the hexadecimal digest that are kept."""


def prefix_identity(
    options: EngineOptions, spec: ModelSpec, model: Any, layout: ArenaLayout, form: CheckpointForm
) -> dict[str, str | int]:
    """Equal exactly where one engine may use another's stored prefixes. `model`: its module. A small copy
    from the device for each tensor."""
    places = (layout.page_tensors, [p for p in layout.slot_tensors if p.offset < form.slot_bytes])
    return {
        "model": _weights(spec, model),
        "layout": _digest(repr((places, astuple(form)))),
        "page_size": layout.page_size,
        "kv_dtype": options.kept_kv_dtype or spec.dtype,
        "state_dtype": spec.state_dtype,
        "checkpoint_dtype": form.dtype,
    }


def _weights(spec: ModelSpec, model: Any) -> str:
    digest = hashlib.sha256(repr(spec).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        numbers = tensor.detach().reshape(-1)
        sample = numbers[:: max(1, len(numbers) // SAMPLED)][:SAMPLED].contiguous()
        digest.update(sample.view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()[:DIGITS]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]
