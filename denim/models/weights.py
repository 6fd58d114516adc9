"""Weights from a folder of safetensors files, single or sharded.

Owns the reading of files: which file holds which tensor, and the check that every tensor of the model is
there once, with its shape. Files are memory-mapped and copied tensor by tensor, so that loading needs no
more memory than the model. The index decides which shard a tensor comes from; the headers of the files
decide what exists, and which weights are FP8 with a scale beside them (dequantised here).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from denim.errors import ConfigError
from denim.layers.norm import RMSNorm
from denim.models.causal_lm import EMBEDDING, HEAD
from denim.models.family import Model
from denim.models.fp8 import SCALE_SUFFIX, dequantise
from denim.models.registry import family_of
from denim.spec.model import ModelSpec

log = logging.getLogger("denim")

INDEX = "model.safetensors.index.json"
MTP_PREFIX = "mtp."
APPENDED_MTP = ".enorm.weight"

# A projection with at least this share of all-zero rows is reported: published files with zeroed
# projections exist, and nothing else would show it.
SUSPICIOUS_ZERO_ROWS = 1 / 16

PLAIN_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

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
    where = find_tensors(folder)
    published: dict[str, str] = {}
    for name in where:
        canonical = family.canonical_name(name)
        if canonical is not None:
            if canonical in published:
                raise ConfigError(
                    f"{folder}: {name!r} and {published[canonical]!r} are the same tensor under two names"
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
    _check_names(folder, targets, published, where, tied=spec.tie_embeddings)
    with _Files(where, spec.weight_blocks) as files:
        for name, target in progress(sorted(targets.items()), "weights"):
            tensor = files.weight(published[name], scales.get(name))
            if tensor.shape != target.shape:
                raise ConfigError(
                    f"{where[published[name]]}: tensor {published[name]!r} has shape {list(tensor.shape)},"
                    f" the config asks for {list(target.shape)}"
                )
            _warn_of_zero_rows(published[name], tensor)
            target.copy_(tensor)
        if spec.tie_embeddings and HEAD in published:
            _check_tied(*(files.weight(published[name], scales.get(name)) for name in (EMBEDDING, HEAD)))
    model.prepare()
    return model


def _with_appended_mtp(published: dict[str, str]) -> dict[str, str]:
    """Give an MTP head that is published as one more layer (DeepSeek-V3's form: the layer that has a norm
    `enorm` of its own for embeddings) the prefix of MTP heads."""
    heads = tuple(name.removesuffix(APPENDED_MTP) + "." for name in published if name.endswith(APPENDED_MTP))
    return {(MTP_PREFIX + name if name.startswith(heads) else name): seen for name, seen in published.items()}


def find_tensors(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file to read it from.

    With an index, a tensor comes from the shard that the index assigns, whatever else the shards hold;
    an MTP head that the index forgot is found in the files' headers. Raises ConfigError that names
    missing or unreadable files.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give the folder that holds config.json and weights")
    files = sorted(folder.glob("*.safetensors"))
    index = folder / INDEX
    if not index.exists():
        if not files:
            raise ConfigError(f"{folder} holds no *.safetensors file; Denim reads no other weight format")
        where: dict[str, Path] = {}
        for file in files:
            for name in _header(file):
                if name in where:
                    raise ConfigError(
                        f"{folder}: tensor {name!r} is in {where[name].name} and in {file.name}, and there"
                        f" is no {INDEX} to choose"
                    )
                where[name] = file
        return where

    try:
        assigned = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{index} is not a safetensors index: {error!r}") from None
    shards = {folder / file for file in assigned.values()}
    lost = sorted(file.name for file in shards if not file.exists())
    if lost:
        raise ConfigError(
            f"{index.name} names {len(lost)} missing file(s): {', '.join(lost)}; download again"
        )
    headers = {file: set(_header(file)) for file in sorted(shards.union(files))}
    where = {name: folder / file for name, file in assigned.items()}
    for name, file in where.items():
        if name not in headers[file]:
            raise ConfigError(f"{index.name} places {name!r} in {file.name}, which does not hold it")
    for file, names in headers.items():
        for name in names - where.keys():
            if name.startswith(MTP_PREFIX):
                log.info("%s, missing in the index, found in %s", name, file.name)
                where[name] = file
            elif file in shards:
                where[name] = file  # surplus: `_check_names` decides
    return where


def _header(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as handle:
            return list(handle.keys())
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{file} is truncated or not a safetensors file ({error}); download again"
        ) from None


def _check_names(
    folder: Path, targets: dict[str, Tensor], published: dict[str, str], where: dict[str, Path], *, tied: bool
) -> None:
    missing = sorted(targets.keys() - published.keys())
    if missing:
        hint = ""
        if missing == [HEAD]:
            hint = "; if the head is the embedding, the config should say tie_word_embeddings: true"
        raise ConfigError(f"{folder}: the weights lack {_some(missing)}{hint}")
    surplus = sorted(published[name] for name in published.keys() - targets.keys())
    if tied and HEAD in surplus:
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


class _Files:
    """Open safetensors files, each mapped once. `where`: tensor name -> file; `block`: of FP8 weights."""

    def __init__(self, where: dict[str, Path], block: tuple[int, int] | None) -> None:
        self._where = where
        self._block = block
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._open.values():
            handle.__exit__(None, None, None)

    def weight(self, name: str, scale: str | None) -> Tensor:
        """The tensor `name`, dequantised by the tensor `scale` if there is one, as fp32 then."""
        tensor = self._tensor(name)
        quantised = tensor.dtype == torch.float8_e4m3fn and self._block is not None
        if tensor.dtype not in PLAIN_DTYPES and not quantised:
            raise ConfigError(
                f"{self._where[name]}: tensor {name!r} is {tensor.dtype}, quantised in a way that the config"
                " does not say or Denim does not read; use a bf16, fp16, fp32 or FP8 block checkpoint"
            )
        if quantised != (scale is not None):
            seen = "has no scale" if quantised else f"is {tensor.dtype} and has a scale, {scale!r}"
            raise ConfigError(
                f"{self._where[name]}: tensor {name!r} {seen}; FP8 weights and scales come in pairs"
            )
        if scale is None or self._block is None:
            return tensor
        try:
            return dequantise(tensor, self._tensor(scale), self._block)
        except ValueError as error:
            raise ConfigError(f"{self._where[scale]}: tensor {scale!r} has {error}") from None

    def _tensor(self, name: str) -> Tensor:
        file = self._where[name]
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt").__enter__()
        return self._open[file].get_tensor(name)


def random_weights(spec: ModelSpec, *, device: torch.device | str, chunk_size: int, seed: int = 0) -> Model:
    """The model of `spec` with random weights, for measurements: no checkpoint is needed for its speed.

    Scales keep activations finite through any depth: 0.02 for matrices, small decays in linear layers.
    """
    model = family_of(spec).build(spec, chunk_size=chunk_size, device=device)
    generator = torch.Generator(device=device).manual_seed(seed)
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
