"""A sparse mixture of experts: a router chooses, the chosen experts run, their outputs are weighed and added.

One module serves every family; what differs between routers is in `MoEFFN`, whose docstring names the fields.
Scores and weights are fp32. On CUDA all experts are one product (`denim.layers.kernels.expert_product`), and
the host never waits for the device to say who was chosen.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from denim.layers.ffn import ACTIVATIONS, GatedFFN, PlainFFN
from denim.layers.fp8_linear import BLOCK, dequantised
from denim.layers.linear import Linear
from denim.layers.norm import RMSNorm
from denim.recurrence.backend import in_kernels
from denim.spec.ffn import MoEFFN


class SparseMoE(nn.Module):
    """`up`: [experts, rows, width], rows = [gate | up] if gated, else up alone; `down`: [experts, width,
    intermediate]; width is that of the latent if the experts work on one, else the hidden size. `bias` (if
    there is a selection bias): [experts] fp32.

    `fp8_experts`: `up` and `down` are FP8 in blocks of 128 x 128, each of which is multiplied with its number
    in `up_scales` or `down_scales`, [experts, rows / 128, columns / 128] fp32; else these are None.
    Activations are not quantised.
    """

    def __init__(
        self,
        spec: MoEFFN,
        hidden: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        fp8_experts: bool = False,
    ):
        super().__init__()
        self.spec = spec
        self.act = ACTIVATIONS[spec.activation]
        router_dtype = torch.float32 if spec.exact_router else dtype
        self.router = Linear(hidden, spec.num_experts, dtype=router_dtype, device=device)

        def empty(*shape: int, of: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=of, device=device), requires_grad=False)

        width = spec.latent or hidden
        self.to_latent = self.from_latent = None
        if spec.latent:
            self.to_latent = Linear(hidden, width, dtype=dtype, device=device)
            self.from_latent = Linear(width, hidden, dtype=dtype, device=device)
        rows = spec.intermediate * (2 if spec.gated else 1)
        expert_dtype = torch.float8_e4m3fn if fp8_experts else dtype
        self.up = empty(spec.num_experts, rows, width, of=expert_dtype)
        self.down = empty(spec.num_experts, width, spec.intermediate, of=expert_dtype)
        self.up_scales = self.down_scales = None
        if fp8_experts:
            grid = (spec.num_experts, rows // BLOCK, width // BLOCK)
            self.up_scales = empty(*grid, of=torch.float32)
            grid = (spec.num_experts, width // BLOCK, spec.intermediate // BLOCK)
            self.down_scales = empty(*grid, of=torch.float32)
        self.bias = empty(spec.num_experts, of=torch.float32) if spec.selection_bias else None
        self.shared = self.shared_gate = None
        if spec.shared_intermediate:
            ffn = GatedFFN if spec.gated else PlainFFN
            self.shared = ffn(
                hidden, spec.shared_intermediate, dtype=dtype, device=device, activation=spec.activation
            )
            if spec.shared_gate:
                self.shared_gate = Linear(hidden, 1, dtype=dtype, device=device)

    def hold_plain_experts(self, dtype: torch.dtype) -> None:
        """Take memory for experts of `dtype` in place of FP8. Call before loading, where files hold such."""
        for name in ("up", "down"):
            plain = torch.empty_like(getattr(self, name), dtype=dtype)
            setattr(self, name, nn.Parameter(plain, requires_grad=False))
            setattr(self, f"{name}_scales", None)

    def forward(self, x: Tensor, *, norm: RMSNorm | None = None, add: Tensor | None = None) -> Tensor:
        """x: [T, hidden] -> [T, hidden]: add + experts(norm(x)); `norm` and `add` may be left out."""
        if norm is not None:
            x = norm(x)
        weights, chosen = self._route(x)
        routed = x if self.to_latent is None else self.to_latent(x)
        out = (self._at_once if in_kernels(x) else self._one_by_one)(routed, weights, chosen)
        if self.from_latent is not None:
            out = self.from_latent(out)
        if self.shared is not None:
            shared = self.shared(x)
            out = out + (shared if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * shared)
        return out if add is None else add + out

    def _at_once(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """All experts as one product, then all their outputs as another."""
        from denim.layers.kernels.expert_choices import sort_choices
        from denim.layers.kernels.expert_product import expert_inner, expert_outer

        choices = sort_choices(chosen, self.spec.num_experts)
        swiglu = self.spec.gated and self.act is F.silu
        inner = expert_inner(x, self.up, choices, gated=swiglu, scales=self.up_scales)
        inner = inner if swiglu else self._activated(inner)
        return expert_outer(inner, self.down, choices, weights, scales=self.down_scales)

    def _activated(self, inner: Tensor) -> Tensor:
        """[..., rows of `up`] -> [..., intermediate]."""
        if not self.spec.gated:
            return self.act(inner)
        gate, up = inner.chunk(2, dim=-1)
        return self.act(gate) * up

    def _one_by_one(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Experts one after another over the tokens that chose them."""
        weights = weights.to(x.dtype).flatten()
        out = torch.zeros_like(x)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.spec.num_experts).tolist()
        begin = 0
        for expert, count in enumerate(counts):
            if not count:
                continue
            picks = order[begin : begin + count]
            begin += count
            tokens = picks // self.spec.top_k
            y = self._activated(F.linear(x[tokens], _expert(self.up, self.up_scales, expert, x.dtype)))
            y = F.linear(y, _expert(self.down, self.down_scales, expert, x.dtype))
            out.index_add_(0, tokens, y * weights[picks, None])
        return out

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and expert ids of every token's choice, [T, top_k] each."""
        spec = self.spec
        logits = self.router(x.float() if spec.exact_router else x).float()
        if spec.scoring == "softmax_top_k":
            best, chosen = logits.topk(spec.top_k, dim=-1)
            return best.softmax(dim=-1) * spec.scale, chosen
        scores = logits.softmax(dim=-1) if spec.scoring == "softmax" else logits.sigmoid()
        ranked = scores if self.bias is None else scores + self.bias
        if spec.groups > 1:
            by_group = ranked.unflatten(-1, (spec.groups, -1))
            strength = by_group.topk(2, dim=-1).values.sum(dim=-1)
            kept = torch.zeros_like(strength, dtype=torch.bool)
            kept.scatter_(-1, strength.topk(spec.top_groups, dim=-1).indices, True)
            ranked = by_group.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
        chosen = ranked.topk(spec.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if spec.renormalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + spec.guard)
        return weights * spec.scale, chosen


def _expert(weight: Tensor, scales: Tensor | None, expert: int, dtype: torch.dtype) -> Tensor:
    return weight[expert] if scales is None else dequantised(weight[expert], scales[expert]).to(dtype)
