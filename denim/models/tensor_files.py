"""Weights in a folder of safetensors files, single or sharded, tensor by tensor.

Owns the reading of files: which file holds which tensor, what a tensor's dtype must be, and FP8 values with
the scale beside them. Files are memory-mapped. The index decides which shard a tensor comes from; the headers
of the files decide what exists. Knows nothing of models.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from denim.errors import ConfigError
from denim.models.fp8 import check_scale, dequantise

log = logging.getLogger("denim")

INDEX = "model.safetensors.index.json"
MTP_PREFIX = "mtp."

PLAIN_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


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
            raise ConfigError(
                f"{folder} holds no *.safetensors file; Denim reads no other weight format: convert them"
            )
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
        shards = {folder / file for file in assigned.values()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{index} is not a safetensors index: {error!r}; download it again") from None
    lost = sorted(file.name for file in shards if not file.exists())
    if lost:
        raise ConfigError(
            f"{index.name} names {len(lost)} missing file(s): {', '.join(lost)}; download again"
        )
    headers = {file: set(_header(file)) for file in sorted(shards.union(files))}
    where = {name: folder / file for name, file in assigned.items()}
    for name, file in where.items():
        if name not in headers[file]:
            raise ConfigError(
                f"{index.name} places {name!r} in {file.name}, which does not hold it; download both again"
            )
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


class TensorFiles:
    """Open safetensors files, each mapped once. `where`: tensor name -> file; `block`: of FP8 weights."""

    def __init__(self, where: dict[str, Path], block: tuple[int, int] | None) -> None:
        self._where = where
        self._block = block
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._open.values():
            handle.__exit__(None, None, None)

    def weight(self, name: str, scale: str | None) -> Tensor:
        """The tensor `name`, dequantised by the tensor `scale` if there is one, as fp32 then.

        Raises ConfigError for a dtype that is not read and for values and scales that do not fit.
        """
        if scale is None:
            return self._checked(name, None)
        values, numbers = self.quantised(name, scale)
        assert self._block is not None
        return dequantise(values, numbers, self._block)

    def quantised(self, name: str, scale: str) -> tuple[Tensor, Tensor]:
        """FP8 values and their scales, one a block, in the dtype of the file. Raises ConfigError as above."""
        values = self._checked(name, scale)
        numbers = self._tensor(scale)
        assert self._block is not None
        try:
            check_scale(values, numbers, self._block)
        except ValueError as error:
            raise ConfigError(f"{self._where[scale]}: tensor {scale!r} has {error}; download again") from None
        return values, numbers

    def _checked(self, name: str, scale: str | None) -> Tensor:
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
                f"{self._where[name]}: tensor {name!r} {seen}; FP8 weights and scales come in pairs:"
                " download again"
            )
        return tensor

    def _tensor(self, name: str) -> Tensor:
        file = self._where[name]
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt").__enter__()
        return self._open[file].get_tensor(name)
