"""What a visitor of the explorer can choose, and the checked choice.

Owns the names that stand in a link. Which dims of a model can be turned the model's dials say
(`denim.spec.dials`). Knows no bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from denim.errors import ConfigError
from denim.ledger.flops import CHUNK
from denim.memory.capacity_plan import PAGE_SIZE
from denim.spec.dials import NAMES

FIRST_MODEL = "Qwen3.5-0.8B"
MOST_TOKENS = 1 << 20

Weights = Literal["auto", "bfloat16", "float16", "float32"]
States = Literal["auto", "float32", "bfloat16", "float16"]
Keys = Literal["auto", "bfloat16", "float16", "float32", "float8_e4m3fn"]
Distribution = Literal["fixed", "lognormal", "trace"]

STEPS = 40
"""Parts into which the way from an empty to a full memory is divided."""


class Settings(BaseModel):
    """One choice. None: as the model has it; of `gpus`, the fewest that hold it. `tokens` is the length of
    every request, or with "lognormal" the mean of them; `sigma` the standard deviation of the logarithm.
    `step` of `STEPS`: how full memory is.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str = FIRST_MODEL
    layers: int | None = None
    full_share: float | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    latent_dim: int | None = None
    linear_heads: int | None = None
    key_dim: int | None = None
    value_dim: int | None = None
    channels: int | None = None
    dtype: Weights = "auto"
    state_dtype: States = "auto"
    kv_dtype: Keys = "auto"
    page: int = Field(PAGE_SIZE, ge=1, le=1024)
    chunk: int = Field(CHUNK, ge=1, le=1024)
    lengths: Distribution = "fixed"
    tokens: int = Field(4096, ge=1, le=MOST_TOKENS)
    sigma: float = Field(1.0, ge=0, le=3)
    device: str = "H200"
    gpus: int | None = Field(None, ge=1, le=64)
    step: int = Field(STEPS, ge=0, le=STEPS)

    @property
    def changes(self) -> dict[str, float]:
        """The dials that were turned."""
        return {name: value for name in NAMES if (value := getattr(self, name)) is not None}


def read_settings(query: Mapping[str, str]) -> Settings:
    """The settings in a link's query. Raises ConfigError naming the first setting that cannot be."""
    try:
        return Settings.model_validate(dict(query))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{name}={first['input']!r}: {first['msg'].lower()}") from None
