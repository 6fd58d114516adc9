"""Dense feed-forward networks, gated (SwiGLU) and plain.

SwiGLU: Shazeer 2020 (arXiv 2002.05202). Gate and up projections are one fused product.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from denim.layers.linear import Linear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu2": lambda x: F.relu(x).square(),
}


class GatedFFN(nn.Module):
    """down(act(gate_scale * gate(x)) * up(x)); `gate_up.weight` is [gate | up] by rows."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        activation: str = "silu",
        gate_scale: float = 1.0,
    ):
        super().__init__()
        self.intermediate = intermediate
        self.gate_scale = gate_scale
        self.act = ACTIVATIONS[activation]
        self.gate_up = Linear(hidden, 2 * intermediate, dtype=dtype, device=device)
        self.down = Linear(intermediate, hidden, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).split(self.intermediate, dim=-1)
        if self.gate_scale != 1.0:
            gate = gate * self.gate_scale
        return self.down(self.act(gate).mul_(up))


class PlainFFN(nn.Module):
    """down(act(up(x)))."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        activation: str = "relu2",
    ):
        super().__init__()
        self.act = ACTIVATIONS[activation]
        self.up = Linear(hidden, intermediate, dtype=dtype, device=device)
        self.down = Linear(intermediate, hidden, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))
