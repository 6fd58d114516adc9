"""Root-mean-square norms, computed in fp32 and returned in the input's dtype.

RMSNorm: Zhang and Sennrich 2019 (arXiv 1910.07467). `GatedRMSNorm` multiplies the normed values with
silu(gate), as Gated DeltaNet does (arXiv 2412.06464), or with sigmoid(gate), as KDA does (arXiv 2510.26692).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from denim.recurrence.backend import in_kernels


class RMSNorm(nn.Module):
    """y = x / rms(x) * scale over the last dimension, where scale = 1 + weight when `zero_centred`.

    Call `prepare` once after the weight is loaded: it fixes the fp32 scale.
    """

    def __init__(
        self, dim: int, eps: float, *, zero_centred: bool, dtype: torch.dtype, device: torch.device | str
    ):
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.zero_centred = zero_centred
        self.weight = nn.Parameter(torch.empty(dim, dtype=dtype, device=device), requires_grad=False)
        self.register_buffer("scale", torch.empty(dim, dtype=torch.float32, device=device), persistent=False)

    def prepare(self) -> None:
        scale = self.weight.float()
        self.scale = scale + 1.0 if self.zero_centred else scale

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., dim] -> the same shape and dtype."""
        if in_kernels(x):
            from denim.layers.kernels.rms_norm import rms_norm

            return rms_norm(x.reshape(-1, self.dim), self.scale, self.eps).view(x.shape)
        return self.normed(x).to(x.dtype)

    def normed(self, x: Tensor) -> Tensor:
        """The result in fp32. On a CPU it is written out: torch's own makes twice as many passes there."""
        x = x.float()
        if x.is_cuda:
            return F.rms_norm(x, (self.dim,), self.scale, self.eps)
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        inverse.div_(self.dim).add_(self.eps).rsqrt_()
        return (x * inverse).mul_(self.scale)


class GatedRMSNorm(RMSNorm):
    """y = (x / rms(x) * weight) * silu(gate), or sigmoid(gate) if `sigmoid`; x and gate: [..., dim]."""

    def __init__(
        self,
        dim: int,
        eps: float,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        sigmoid: bool = False,
    ):
        super().__init__(dim, eps, zero_centred=False, dtype=dtype, device=device)
        self.sigmoid = sigmoid

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        if self.sigmoid:
            return self.normed(x).mul_(gate.float().sigmoid()).to(gate.dtype)
        return self.normed(x).mul_(F.silu(gate.float(), inplace=gate.dtype != torch.float32)).to(gate.dtype)


class GroupedGatedRMSNorm(RMSNorm):
    """norm(x · silu(gate)), or norm(x) · silu(gate) if `before_gate`; x and gate: [..., dim].

    The root mean square is taken over each of `groups` equal parts of the last dimension (Mamba2, arXiv
    2405.21060, which has a group a device).
    """

    def __init__(
        self,
        dim: int,
        eps: float,
        *,
        groups: int,
        before_gate: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        super().__init__(dim, eps, zero_centred=False, dtype=dtype, device=device)
        self.groups = groups
        self.before_gate = before_gate

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        gated = F.silu(gate.float())
        wide = x.float() if self.before_gate else x.float() * gated
        parts = wide.unflatten(-1, (self.groups, -1))
        parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + self.eps)
        wide = parts.flatten(-2) * self.scale
        return (wide * gated if self.before_gate else wide).to(gate.dtype)
