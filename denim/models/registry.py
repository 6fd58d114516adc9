"""Which class serves which family.

Adding a family: one config reader in `denim.spec`, one model file here, one row in this table.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import NamedTuple, Protocol

from torch import Tensor

from denim.errors import ConfigError
from denim.layers.batch import StepBatch
from denim.models import qwen3_5
from denim.spec.model import ModelSpec


class Model(Protocol):
    """What the engine asks of a model, of whatever family."""

    spec: ModelSpec

    def __call__(self, tokens: Tensor, batch: StepBatch) -> Tensor:
        """tokens [T] int64 -> hidden states [T, hidden]; the batch's pages and slots are written."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> logits [R, vocab] in fp32."""
        ...

    def targets(self, published: Container[str] = ()) -> dict[str, Tensor]:
        """Published tensor name -> the memory that it is copied into."""
        ...

    def prepare(self) -> None:
        """Fix what is derived from weights. Called once after they are loaded."""
        ...


class Family(NamedTuple):
    """`build(spec, chunk_size=, device=)` makes the model with empty weights; `canonical_name` maps a
    published tensor name to the one that the model's `targets()` use, or to None to leave it out."""

    build: Callable[..., Model]
    canonical_name: Callable[[str], str | None]


FAMILIES = {
    "qwen3_5": Family(qwen3_5.Qwen3_5, qwen3_5.canonical_name),
    "qwen3_5_moe": Family(qwen3_5.Qwen3_5, qwen3_5.canonical_name),
}


def family_of(spec: ModelSpec) -> Family:
    """Raises ConfigError for a family that has a config reader but no model."""
    if spec.family not in FAMILIES:
        raise ConfigError(f"no model for family {spec.family!r}; supported: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[spec.family]
