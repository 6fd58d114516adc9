"""Feed-forward networks: SwiGLU, and a sparse mixture of SwiGLU experts with one shared expert.

SwiGLU: Shazeer 2020 (arXiv 2002.05202). Gate and up projections are one fused product.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from denim.layers.linear import Linear
from denim.spec.model import MoEFFN


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)); `gate_up.weight` is [gate | up] by rows."""

    def __init__(self, hidden: int, intermediate: int, *, dtype: torch.dtype, device: torch.device | str):
        super().__init__()
        self.intermediate = intermediate
        self.gate_up = Linear(hidden, 2 * intermediate, dtype=dtype, device=device)
        self.down = Linear(intermediate, hidden, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).split(self.intermediate, dim=-1)
        return self.down(F.silu(gate).mul_(up))


class SparseMoE(nn.Module):
    """Each token goes through its top-k experts, weighted by the renormalised softmax of the router,
    and through the shared expert, weighted by a sigmoid gate.

    `gate_up`: [experts, 2·intermediate, hidden]; `down`: [experts, hidden, intermediate].
    """

    def __init__(self, spec: MoEFFN, hidden: int, *, dtype: torch.dtype, device: torch.device | str):
        super().__init__()
        self.top_k = spec.top_k
        self.intermediate = spec.intermediate
        self.router = Linear(hidden, spec.num_experts, dtype=dtype, device=device)

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)

        self.gate_up = empty(spec.num_experts, 2 * spec.intermediate, hidden)
        self.down = empty(spec.num_experts, hidden, spec.intermediate)
        if spec.shared_intermediate:
            self.shared = SwiGLU(hidden, spec.shared_intermediate, dtype=dtype, device=device)
            self.shared_gate = Linear(hidden, 1, dtype=dtype, device=device)
        else:
            self.shared = None

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, hidden]. Experts run one after another over the tokens that chose them."""
        scores = F.softmax(self.router(x), dim=-1, dtype=torch.float32)
        weights, chosen = scores.topk(self.top_k, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)

        out = torch.zeros_like(x)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.gate_up.shape[0]).tolist()
        begin = 0
        for expert, count in enumerate(counts):
            if not count:
                continue
            picks = order[begin : begin + count]
            begin += count
            tokens = picks // self.top_k
            gate, up = F.linear(x[tokens], self.gate_up[expert]).split(self.intermediate, dim=-1)
            y = F.linear(F.silu(gate) * up, self.down[expert])
            out.index_add_(0, tokens, y * weights.flatten()[picks, None])
        if self.shared is not None:
            out = out + torch.sigmoid(self.shared_gate(x)) * self.shared(x)
        return out
