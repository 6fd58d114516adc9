"""Dense feed-forward networks, gated (SwiGLU) and plain.

SwiGLU: Shazeer 2020 (arXiv 2002.05202). Gate and up projections are one fused product.

Each takes the norm before it and the residual behind it along, see `denim.layers.linear.Linear.project`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from denim.layers.linear import Linear, few_rows
from denim.layers.norm import RMSNorm
from denim.recurrence.backend import in_kernels

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

    def forward(self, x: Tensor, *, norm: RMSNorm | None = None, add: Tensor | None = None) -> Tensor:
        """x: [T, hidden] -> [T, hidden]: add + network(norm(x)); `add` is given up."""
        return self.down.project(self._inner(x, norm), add=add)

    def _inner(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """[T, hidden] -> [T, intermediate], the input of `down`."""
        fused = self.act is F.silu and in_kernels(x)
        if fused and few_rows(x, self.gate_up.weight):
            return self.gate_up.small(x, norm, gated=True, gate_scale=self.gate_scale)
        gate_up = self.gate_up.project(x, norm=norm)
        if fused:
            from denim.layers.kernels.gated_activation import silu_mul

            return silu_mul(gate_up, self.gate_scale)
        gate, up = gate_up.split(self.intermediate, dim=-1)
        if self.gate_scale != 1.0:
            gate = gate * self.gate_scale
        return self.act(gate).mul_(up)


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

    def forward(self, x: Tensor, *, norm: RMSNorm | None = None, add: Tensor | None = None) -> Tensor:
        """x: [T, hidden] -> [T, hidden]: add + network(norm(x)); `add` is given up."""
        return self.down.project(self.act(self.up.project(x, norm=norm)), add=add)
