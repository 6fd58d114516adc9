"""Two mixers side by side in one layer."""

from __future__ import annotations

from dataclasses import dataclass

from denim.spec.attention import FullAttention
from denim.spec.mixers import Mixer, StateTensor


@dataclass(frozen=True)
class Parallel(Mixer):
    """Attention and a linear mixer side by side over one input, their outputs added (Falcon-H1)."""

    attention: FullAttention
    linear: Mixer

    letter = "P"

    @property
    def turned_dim(self) -> int:
        return self.attention.turned_dim

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        return self.attention.page_shape(page_size)

    def kv_elements(self) -> int:
        return self.attention.kv_elements()

    def state_tensors(self, state_dtype: str, dtype: str) -> tuple[StateTensor, ...]:
        return self.linear.state_tensors(state_dtype, dtype)

    def record_tensors(self, length: int) -> tuple[StateTensor, ...]:
        return self.linear.record_tensors(length)

    def projection_parameters(self, hidden: int) -> int:
        return self.attention.projection_parameters(hidden) + self.linear.projection_parameters(hidden)

    def parameters(self, hidden: int) -> int:
        return self.attention.parameters(hidden) + self.linear.parameters(hidden)

    def mixing_flops(self, context: int) -> int:
        return self.attention.mixing_flops(context) + self.linear.mixing_flops(context)

    def prefill_mixing_flops(self, tokens: int, chunk: int) -> int:
        parts = (self.attention, self.linear)
        return sum(part.prefill_mixing_flops(tokens, chunk) for part in parts)
