"""What the engine asks of a model, and what a family offers."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from denim.layers.batch import StepBatch
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

    def modules(self) -> Iterator[nn.Module]:
        """All parts, as every torch module gives them."""
        ...

    def prepare(self) -> None:
        """Fix what is derived from weights. Called once after they are loaded."""
        ...


def same_name(name: str) -> str:
    return name


class Family(NamedTuple):
    """`build(spec, chunk_size=, device=)` makes the model with empty weights. `canonical_name` maps a
    published tensor name to the one that the model's `targets()` use, or to None to leave it out. `title`
    names the family to people, `note` says what it consists of."""

    build: Callable[..., Model]
    canonical_name: Callable[[str], str | None] = same_name
    title: str = ""
    note: str = ""
