"""From a config to a `ModelSpec`.

Owns the registry of families by `model_type`. Knows nothing of what a family's keys mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from denim.errors import ConfigError
from denim.spec import qwen3_5
from denim.spec.config_file import Source, load_config
from denim.spec.model import ModelSpec

Reader = Callable[[Mapping[str, Any], str, str], ModelSpec]

READERS: dict[str, Reader] = {
    "qwen3_5": qwen3_5.read_wrapper,
    "qwen3_5_moe": qwen3_5.read_wrapper,
    "qwen3_5_text": qwen3_5.read_text,
    "qwen3_5_moe_text": qwen3_5.read_text,
}

DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")


def read_spec(source: Source, *, dtype: str = "auto", state_dtype: str = "auto") -> ModelSpec:
    """The description of the model that `source` configures: a config as dict, a model folder, or the path
    of a config.json.

    `dtype` is that of weights, activations and KV, "auto" the config's. `state_dtype` is that of recurrent
    states, "auto" the config's, or float32 where it says nothing. Raises ConfigError naming the key, the
    value seen and what is supported.
    """
    for name, value in (("dtype", dtype), ("state_dtype", state_dtype)):
        if value not in DTYPES:
            raise ConfigError(f"{name} is {value!r}; supported: {', '.join(DTYPES)}")
    config = load_config(source)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in READERS:
        seen = f"is {kind!r}" if kind is not None else "is missing"
        raise ConfigError(f"config.json: 'model_type' {seen}; supported: {', '.join(sorted(READERS))}")
    return READERS[kind](config, dtype, state_dtype)
