"""Everything that a model folder holds, read for the engine.

Owns the order: config, then generation defaults and tokenizer, then weights. Knows which device and dtype
were asked for; knows nothing of memory or requests.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from denim.engine.options import EngineOptions
from denim.engine.tokenizer import Tokenizer, load_tokenizer
from denim.errors import ConfigError
from denim.models.family import Model
from denim.models.weights import load_model
from denim.recurrence.backend import check_wish
from denim.spec.generation import GenerationDefaults, read_generation_defaults
from denim.spec.model import ModelSpec
from denim.spec.reader import read_spec

log = logging.getLogger("denim")

# Below this size loading takes well under a second, and a progress bar would only flicker.
PROGRESS_FROM_BYTES = 256 * 2**20


class LoadedModel(NamedTuple):
    """`tokenizer` is None for a folder without one: it serves token ids."""

    name: str
    spec: ModelSpec
    model: Model
    tokenizer: Tokenizer | None
    defaults: GenerationDefaults
    device: torch.device


def choose_device(name: str) -> torch.device:
    """Raises ConfigError for a device that this torch does not have."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise ConfigError(f"device={name!r}; supported: 'auto', 'cpu', 'cuda', 'cuda:N'") from None
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index is not None):
        raise ConfigError(f"device={name!r}; supported: 'auto', 'cpu', 'cuda', 'cuda:N'")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(
                f"device={name!r}, but torch {torch.__version__} sees {count} CUDA devices; take 'auto' or"
                " 'cpu'"
            )
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
    return device


def load(options: EngineOptions) -> LoadedModel:
    """Read the model that `options` name. Raises ConfigError naming what is missing or unsupported."""
    folder = options.folder
    if not folder.is_dir():
        raise ConfigError(
            f"model {str(folder)!r} is not a folder; give the path of a Hugging Face model folder"
            " (config.json and *.safetensors); Denim downloads nothing"
        )
    device = choose_device(options.device)
    spec = read_spec(folder, dtype=options.dtype, state_dtype=options.state_dtype)
    defaults = read_generation_defaults(folder)
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        log.info("%s has no tokenizer: it serves token ids, not text", folder)
    check_wish(options.recurrence_backend, device.type)
    model = load_model(spec, folder, device=device, chunk_size=options.chunk_size, progress=_progress(folder))
    for module in model.modules():
        if hasattr(module, "recurrence_backend"):
            module.recurrence_backend = options.recurrence_backend  # type: ignore[assignment]
    return LoadedModel(folder.name, model.spec, model, tokenizer, defaults, device)


def _progress(folder: Path) -> Any:
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))

    def bar(items: Iterable[Any], title: str) -> Iterable[Any]:
        if size < PROGRESS_FROM_BYTES or not sys.stderr.isatty():
            return items
        from rich.console import Console
        from rich.progress import track

        return track(items, description=title, console=Console(stderr=True), transient=True)

    return bar
