"""A model filled with the weights of a folder.

Owns the check that every tensor of the model is there once, with its shape, and the copy, tensor by tensor,
so that loading needs no more memory than the model in its dtype. FP8 weights that the device can multiply as
they are stay so (`denim.models.fp8_kept`), others are dequantised. Files are `denim.models.tensor_files`'.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from denim.errors import ConfigError
from denim.layers.norm import RMSNorm
from denim.ledger.parameters import weight_bytes
from denim.ledger.units import size_text
from denim.models.causal_lm import EMBEDDING, HEAD
from denim.models.family import Model
from denim.models.fp8 import SCALE_SUFFIX
from denim.models.fp8_kept import Kept, can_keep, keep, plain_experts
from denim.models.registry import family_of
from denim.models.tensor_files import MTP_PREFIX, TensorFiles, find_tensors
from denim.spec.model import ModelSpec

log = logging.getLogger("denim")

APPENDED_MTP = ".enorm.weight"

# A projection with at least this share of all-zero rows is reported: published files with zeroed
# projections exist, and nothing else would show it.
SUSPICIOUS_ZERO_ROWS = 1 / 16

MOST_BYTES = 2**50
"""Of all weights: a hundred times those of the largest published model, and far below what overflows."""

Progress = Callable[[Iterable[Any], str], Iterable[Any]]


def load_model(
    spec: ModelSpec,
    folder: Path,
    *,
    device: torch.device | str,
    chunk_size: int,
    progress: Progress = lambda items, title: items,
) -> Model:
    """The model of `spec` with the weights in `folder`, ready to run.

    `progress(items, title)` wraps the loop over tensors. Raises ConfigError that names the file or
    tensor when one is missing, surplus, doubled, of another shape, or unreadable.
    """
    family = family_of(spec)
    if weight_bytes(spec) > MOST_BYTES:
        raise ConfigError(
            f"{folder}: the config asks for {size_text(weight_bytes(spec))} of weights; correct its sizes"
        )
    where = find_tensors(folder)
    published: dict[str, str] = {}
    for name in where:
        canonical = family.canonical_name(name)
        if canonical is not None:
            if canonical in published:
                raise ConfigError(
                    f"{folder}: {name!r} and {published[canonical]!r} are the same tensor under two names;"
                    " remove one"
                )
            published[canonical] = name
    published = _with_appended_mtp(published)

    found_mtp = any(name.startswith(MTP_PREFIX) for name in published)
    if spec.mtp_layers and not found_mtp:
        log.warning("the weights lack the MTP head that is expected: speculation by MTP is off")
        spec = replace(spec, mtp_layers=())
    elif found_mtp and not spec.mtp_layers:
        log.warning("the weights hold an MTP head that is not expected for this model: it is left out")
        published = {k: v for k, v in published.items() if not k.startswith(MTP_PREFIX)}

    scales: dict[str, str] = {}
    if spec.weight_blocks is not None:
        for name in [name for name in published if name.endswith(SCALE_SUFFIX)]:
            scales[name.removesuffix(SCALE_SUFFIX)] = published.pop(name)
        stray = sorted(scale for name, scale in scales.items() if name not in published)
        if stray:
            raise ConfigError(f"{folder}: no weights belong to the scales {_some(stray)}; download again")

    model = family.build(spec, chunk_size=chunk_size, device=device)
    targets = model.targets(published)
    _check_names(folder, targets, published, where)
    kept: dict[str, Kept] = {}
    if can_keep(spec, device):
        if plain_experts(model, targets, set(scales)):
            targets = model.targets(published)
        kept = keep(model, targets, set(scales))
    if scales:
        log.info(
            "FP8 blocks: %d tensors are multiplied as they are, %d are dequantised to %s",
            len(kept),
            len(scales) - len(kept),
            spec.dtype,
        )
    with TensorFiles(where, spec.weight_blocks) as files:
        for name in progress(sorted([*targets, *kept]), "weights"):
            file = where[published[name]]
            if name in kept:
                tensor, scale = files.quantised(published[name], scales[name])
                _fill(file, published[name], tensor.view(torch.uint8), kept[name].values.view(torch.uint8))
                kept[name].scales.copy_(scale)
            else:
                tensor = files.weight(published[name], scales.get(name))
                _fill(file, published[name], tensor, targets[name])
        if spec.tie_embeddings and HEAD in published:
            _check_tied(*(files.weight(published[name], scales.get(name)) for name in (EMBEDDING, HEAD)))
    if kept:
        torch.cuda.empty_cache()  # of the weights that made room for FP8; the arena is to have it
    model.prepare()
    return model


def _with_appended_mtp(published: dict[str, str]) -> dict[str, str]:
    """Give an MTP head that is published as one more layer (DeepSeek-V3's form: the layer that has a norm
    `enorm` of its own for embeddings) the prefix of MTP heads."""
    heads = tuple(name.removesuffix(APPENDED_MTP) + "." for name in published if name.endswith(APPENDED_MTP))
    return {(MTP_PREFIX + name if name.startswith(heads) else name): seen for name, seen in published.items()}


def _fill(file: Path, name: str, tensor: Tensor, target: Tensor) -> None:
    if tensor.shape != target.shape:
        raise ConfigError(
            f"{file}: tensor {name!r} has shape {list(tensor.shape)},"
            f" the config asks for {list(target.shape)}; is the config of another model?"
        )
    _warn_of_zero_rows(name, tensor)
    target.copy_(tensor)


def _check_names(
    folder: Path, targets: dict[str, Tensor], published: dict[str, str], where: dict[str, Path]
) -> None:
    missing = sorted(targets.keys() - published.keys())
    if missing:
        hint = "; download them again, or give the model's own config"
        if missing == [HEAD]:
            hint = "; if the head is the embedding, the config should say tie_word_embeddings: true"
        raise ConfigError(f"{folder}: the weights lack {_some(missing)}{hint}")
    surplus = sorted(published[name] for name in published.keys() - targets.keys())
    if HEAD in surplus:  # the head is the embedding, with which the copy is compared
        surplus.remove(HEAD)
    if surplus:
        raise ConfigError(
            f"{folder}: the weights hold {_some(surplus)}, which the config does not account for"
            f" (in {where[surplus[0]].name}); is the config of another model?"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _check_tied(embedding: Tensor, head: Tensor) -> None:
    if embedding.shape != head.shape or not torch.equal(embedding, head.to(embedding.dtype)):
        raise ConfigError(
            "the config ties the head to the embedding (tie_word_embeddings: true), but the weights hold a"
            " different lm_head.weight; set tie_word_embeddings to false or remove the tensor"
        )


def _warn_of_zero_rows(name: str, tensor: Tensor) -> None:
    """Log a warning for a projection with many all-zero rows. Three columns are looked at first."""
    if tensor.ndim != 2 or "proj" not in name:
        return
    probe = tensor[:, [0, tensor.shape[1] // 2, -1]]
    suspects = (probe == 0).all(dim=1).nonzero().flatten()
    if len(suspects) < max(1, SUSPICIOUS_ZERO_ROWS * tensor.shape[0]):
        return
    zero = int((tensor[suspects] == 0).all(dim=1).sum())
    if zero >= max(1, SUSPICIOUS_ZERO_ROWS * tensor.shape[0]):
        log.warning("tensor %r: %d of %d rows are zero; is the file damaged?", name, zero, tensor.shape[0])


def random_weights(spec: ModelSpec, *, device: torch.device | str, chunk_size: int) -> Model:
    """The model of `spec` with random weights, for measurements: no checkpoint is needed for its speed.

    Scales keep activations finite through any depth: 0.02 for matrices, small decays in linear layers. All
    weights are in the model's dtype, whatever the checkpoint's are.
    """
    spec = replace(spec, weight_blocks=None)
    model = family_of(spec).build(spec, chunk_size=chunk_size, device=device)
    generator = torch.Generator(device=device).manual_seed(0)
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    for norm in norms:
        norm.weight.data.fill_(0.0 if norm.zero_centred else 1.0)
    done = {norm.weight.data_ptr() for norm in norms}
    for name, target in sorted(model.targets().items()):
        if name.endswith("A_log"):
            target.uniform_(1.0, 16.0, generator=generator).log_()
        elif name.endswith("dt_bias"):
            target.fill_(1.0)
        elif target.data_ptr() not in done:
            target.normal_(std=0.02, generator=generator)
    model.prepare()
    return model
