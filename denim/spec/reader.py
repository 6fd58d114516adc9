"""From a config to a `ModelSpec`.

Owns the choice of the family's reader by `model_type`. Readers are found, not listed: a new module in
`denim.spec.families` is enough. Knows nothing of what a family's keys mean.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from denim.errors import ConfigError
from denim.spec import families
from denim.spec.config_file import Source, config_name, load_config
from denim.spec.fields import Fields
from denim.spec.model import ModelSpec
from denim.spec.standard_keys import DTYPES

Reader = Callable[[Fields, str, str], ModelSpec]

ASKED_DTYPES = ("auto", *DTYPES)


def read_spec(source: Source, *, dtype: str = "auto", state_dtype: str = "auto") -> ModelSpec:
    """The description of the model that `source` configures: a config as dict, a model folder, or the path
    of a config.json.

    `dtype` is that of weights, activations and KV, "auto" the config's. `state_dtype` is that of recurrent
    states, "auto" the config's, or float32 where it says nothing. Raises ConfigError naming the key, the
    value seen and what is supported.
    """
    for name, value in (("dtype", dtype), ("state_dtype", state_dtype)):
        if value not in ASKED_DTYPES:
            raise ConfigError(f"{name} is {value!r}; supported: {', '.join(ASKED_DTYPES)}")
    config, where = load_config(source), config_name(source)
    kind = config.get("model_type")
    known = readers()
    if not isinstance(kind, str) or kind not in known:
        seen = f"is {kind!r}" if kind is not None else "is missing"
        raise ConfigError(f"{where}: 'model_type' {seen}; supported: {', '.join(sorted(known))}")
    return known[kind](Fields(config, where), dtype, state_dtype)


@cache
def readers() -> dict[str, Reader]:
    """`model_type` -> the reader of such configs (fields, dtype, state_dtype) -> ModelSpec."""
    found: dict[str, Reader] = {}
    for module in iter_modules(families.__path__):
        found.update(import_module(f"{families.__name__}.{module.name}").READERS)
    return found
