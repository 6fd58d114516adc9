"""Which weights of a model stay in FP8 blocks, and where their values and scales go.

Owns the choice and the exchange of the `Linear`s concerned. Knows names and shapes of published tensors, and
of files only which tensors have a scale. Products are `denim.layers`'.

Experts are most of a sparse model, and in its dtype they may not fit: they are built in FP8 where config and
device allow it. Everything else is built in the model's dtype and exchanged.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from denim.layers.fp8_linear import BLOCK, Fp8Linear, multiplies_blocks
from denim.layers.linear import Linear
from denim.layers.moe import SparseMoE
from denim.models.family import Model
from denim.spec.ffn import MoEFFN
from denim.spec.model import ModelSpec


class Kept(NamedTuple):
    """Memory of one published tensor: values [rows, columns], scales [rows / 128, columns / 128]."""

    values: Tensor
    scales: Tensor


def can_keep(spec: ModelSpec, device: torch.device | str) -> bool:
    """Whether FP8 blocks of this checkpoint can stay as they are on the device."""
    blocks = spec.weight_blocks == (BLOCK, BLOCK)
    return blocks and multiplies_blocks(torch.device(device), getattr(torch, spec.dtype))


def experts_in_fp8(spec: ModelSpec, ffn: MoEFFN, device: torch.device | str) -> bool:
    """Whether to build the experts of a layer in FP8."""
    dims = (ffn.intermediate, ffn.latent or spec.hidden_size)
    return can_keep(spec, device) and all(dim % BLOCK == 0 for dim in dims)


def plain_experts(model: Model, targets: dict[str, Tensor], quantised: set[str]) -> bool:
    """Take the experts that were built in FP8 but are not so in the files back to the model's dtype.

    True if there were some: `targets` are no longer the model's memory then.
    """
    changed = False
    names = _by_storage(targets)
    for module in model.modules():
        if isinstance(module, SparseMoE) and module.up_scales is not None:
            parts = [name for weight in (module.up, module.down) for name in names.get(_storage(weight), [])]
            if not quantised.issuperset(parts):
                module.hold_plain_experts(getattr(torch, model.spec.dtype))
                changed = True
    return changed


def keep(model: Model, targets: dict[str, Tensor], quantised: set[str]) -> dict[str, Kept]:
    """Exchange each `Linear` of `model` that can stay in FP8 for an `Fp8Linear`; call before loading. Experts
    are there already.

    `targets`: published name -> memory, as the model gives it; names of exchanged projections that are not
    quantised get new memory, quantised ones leave it for the result. `quantised`: names with scales.

    The quantised tensors of a fused projection must be its first rows, and rows and columns of each a
    multiple of 128, so that together they are one grid of blocks. Others are dequantised on loading.
    """
    parts = _by_storage(targets)
    kept: dict[str, Kept] = {}
    for parent in list(model.modules()):
        for attribute, linear in list(parent.named_children()):
            if type(linear) is not Linear:
                continue
            names = parts.get(_storage(linear.weight), [])
            names.sort(key=lambda name: targets[name].storage_offset())
            count = _leading_blocks(
                linear, [targets[name] for name in names], [n in quantised for n in names]
            )
            if not count:
                continue
            rows = [len(targets[name]) for name in names]
            weight = linear.weight
            new = Fp8Linear(
                linear.in_features,
                linear.out_features,
                sum(rows[:count]),
                dtype=weight.dtype,
                device=weight.device,
            )
            setattr(parent, attribute, new)
            scales = new.scales.data[:, : linear.in_features // BLOCK].split(
                [n // BLOCK for n in rows[:count]]
            )
            for name, v, s in zip(names, new.values.data.split(rows[:count]), scales, strict=False):
                kept[name] = Kept(v, s)
                del targets[name]
            plain = new.plain.data.split(rows[count:]) if rows[count:] else ()
            targets.update(zip(names[count:], plain, strict=True))
    for module in model.modules():
        if isinstance(module, SparseMoE) and module.up_scales is not None:
            for weight, grid in ((module.up, module.up_scales), (module.down, module.down_scales)):
                for name in parts[_storage(weight)]:
                    kept[name] = Kept(target := targets.pop(name), _scales_of(target, grid.data))
    return kept


def _by_storage(targets: dict[str, Tensor]) -> dict[int, list[str]]:
    """Names of the targets that lie in one tensor's memory, by that memory."""
    names: dict[int, list[str]] = {}
    for name, target in targets.items():
        names.setdefault(_storage(target), []).append(name)
    return names


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _scales_of(target: Tensor, grid: Tensor) -> Tensor:
    """The part of a layer's scales [experts, rows / 128, columns / 128] that belongs to one projection of one
    expert, or to all experts."""
    if target.ndim == grid.ndim:
        return grid
    rows, columns = target.shape
    first = target.storage_offset() // columns // BLOCK
    return grid.flatten(0, 1)[first : first + rows // BLOCK]


def _leading_blocks(linear: Linear, parts: list[Tensor], quantised: list[bool]) -> int:
    """How many of the projection's published parts, in order, are its part in FP8; 0: it is dequantised."""
    shapes_fit = all(part.shape[1:] == (linear.in_features,) and part.is_contiguous() for part in parts)
    count = sum(quantised)
    if not count or not shapes_fit or sum(map(len, parts)) != linear.out_features:
        return 0
    whole = all(len(part) % BLOCK == 0 for part in parts[:count])
    return count if whole and linear.in_features % BLOCK == 0 and all(quantised[:count]) else 0
