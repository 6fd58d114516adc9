"""Models of published dimensions with random weights, for Denim and for its peer alike.

Speed does not depend on the values, so no checkpoint is needed; both engines get the same tensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from denim.engine.core import EngineCore
from denim.engine.loading import LoadedModel
from denim.engine.options import EngineOptions
from denim.models.registry import family_of
from denim.models.weights import random_weights
from denim.spec.generation import GenerationDefaults
from denim.spec.model import ModelSpec
from denim.spec.reader import read_spec

CONFIGS = Path(__file__).parent / "configs"


def spec_of(name: str, dtype: str) -> ModelSpec:
    """The trunk of bench/configs/`name`.json; the MTP head takes no part in these measurements."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    return read_spec(config | {"mtp_num_hidden_layers": 0}, dtype=dtype)


def peer_model(name: str, dtype: str, device: str) -> Any:
    """A random transformers model in eval mode."""
    import transformers

    config = json.loads((CONFIGS / f"{name}.json").read_text())
    config = transformers.Qwen3_5TextConfig(**{k: v for k, v in config.items() if k != "model_type"})
    old = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            model = transformers.Qwen3_5ForCausalLM(config)
    finally:
        torch.set_default_dtype(old)
    return model.eval()


def engine(
    name: str, dtype: str, device: str, state_dict: dict[str, torch.Tensor] | None = None, **options: Any
) -> EngineCore:
    """An engine over random weights, or over a peer's `state_dict`. It computes every prompt anew unless
    `checkpoint_policy` says otherwise."""
    options = {"checkpoint_policy": "none", **options}
    opts = EngineOptions.of(device=device, dtype=dtype, **options)
    spec = spec_of(name, dtype)
    if state_dict is None:
        model = random_weights(spec, device=device, chunk_size=opts.chunk_size)
    else:
        model = family_of(spec).build(spec, chunk_size=opts.chunk_size, device=device)
        for tensor_name, target in model.targets().items():
            target.copy_(state_dict[tensor_name])
        model.prepare()
    loaded = LoadedModel(f"{name} (random)", spec, model, None, GenerationDefaults(), torch.device(device))
    return EngineCore(opts, loaded)
