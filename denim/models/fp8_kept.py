"""Which projections of a model stay in FP8 blocks, and where their values and scales go.

Owns the choice and the exchange of the `Linear`s concerned. Knows names and shapes of published tensors, and
of files only which tensors have a scale. The product is `denim.layers.fp8_linear`'s.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from denim.layers.fp8_linear import BLOCK, Fp8Linear
from denim.layers.linear import Linear
from denim.models.family import Model


class Kept(NamedTuple):
    """Memory of one published tensor: values [rows, columns], scales [rows / 128, columns / 128]."""

    values: Tensor
    scales: Tensor


def keep(model: Model, targets: dict[str, Tensor], quantised: set[str]) -> dict[str, Kept]:
    """Exchange each `Linear` of `model` that can stay in FP8 for an `Fp8Linear`; call before loading.

    `targets`: published name -> memory, as the model gives it; names of exchanged projections that are not
    quantised get new memory, quantised ones leave it for the result. `quantised`: names with scales.

    The quantised tensors of a fused projection must be its first rows, and rows and columns of each a
    multiple of 128, so that together they are one grid of blocks. Others are dequantised on loading.
    """
    parts: dict[int, list[str]] = {}
    for name, target in targets.items():
        parts.setdefault(target.untyped_storage().data_ptr(), []).append(name)
    kept: dict[str, Kept] = {}
    for parent in list(model.modules()):
        for attribute, linear in list(parent.named_children()):
            if type(linear) is not Linear:
                continue
            names = parts.get(linear.weight.untyped_storage().data_ptr(), [])
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
    return kept


def _leading_blocks(linear: Linear, parts: list[Tensor], quantised: list[bool]) -> int:
    """How many of the projection's published parts, in order, are its part in FP8; 0: it is dequantised."""
    shapes_fit = all(part.shape[1:] == (linear.in_features,) and part.is_contiguous() for part in parts)
    count = sum(quantised)
    if not count or not shapes_fit or sum(map(len, parts)) != linear.out_features:
        return 0
    whole = all(len(part) % BLOCK == 0 for part in parts[:count])
    return count if whole and linear.in_features % BLOCK == 0 and all(quantised[:count]) else 0
