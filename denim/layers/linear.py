"""Matrix products with weights that do not change: y = x Wᵀ.

Owns the storage of one weight [out, in] and, on a CPU in bf16, its oneDNN-packed copy; chooses who computes
the product and how much of what stands around it (norm before, residual behind) is done in the same kernel.
Knows nothing of what the weight means. A fused projection is one `Linear` whose rows are several published
tensors; the loader fills row slices of `weight` (see `denim.models.weights`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from denim.layers.norm import RMSNorm
from denim.recurrence.backend import in_kernels

# oneDNN chooses the packed layout for a row count. Packed for one row, products of 1 and of 8 rows run
# at 1.7 and 2.2 times the speed of the plain weight, and products of 512 rows no slower (measured on a
# two-core AVX512-BF16 machine); packed for 8 or 512 rows, single rows gain nothing.
PACKED_FOR_ROWS = 1

# Rows up to which Denim's own kernels are faster than cuBLAS with what they save around it (on an H200).
FEW_ROWS = 64
# Tiles of such a product that several programs may share; only products with fewer columns are shared at all.
SHARED_TILES = 256


def can_pack(weight: Tensor) -> bool:
    """Whether packing helps: bf16 on a CPU with oneDNN. fp32 keeps the plain product."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def few_rows(x: Tensor, weight: Tensor) -> bool:
    """Whether `denim.layers.kernels.small_product` takes the product of x [..., K] with a weight [N, K]."""
    rows = x.numel() // x.shape[-1]
    return in_kernels(x) and 0 < rows <= FEW_ROWS and weight.numel() > 0


class Linear(nn.Module):
    """y = x Wᵀ without bias. `weight`: [out_features, in_features]."""

    def __init__(
        self, in_features: int, out_features: int, *, dtype: torch.dtype, device: torch.device | str
    ):
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, dtype=dtype, device=device), requires_grad=False
        )
        self._packed: Tensor | None = None
        # On CUDA: counters of programs that share a tile, see `denim.layers.kernels.small_product`.
        counters = None
        if torch.device(device).type == "cuda":
            counters = torch.zeros(SHARED_TILES, dtype=torch.int32, device=device)
        self.register_buffer("arrivals", counters, persistent=False)

    def pack(self, *, keep: bool = False) -> None:
        """Pack the weight for the CPU where that helps, and drop the plain copy unless `keep`.

        Call once, after loading. A tied embedding keeps its plain copy, which the embedding reads.
        """
        if self._packed is not None or not can_pack(self.weight):
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data, PACKED_FOR_ROWS)
        if not keep:
            self.weight = nn.Parameter(self.weight.data.new_empty(0), requires_grad=False)

    def reorder_rows(self, rows: Tensor) -> None:
        """Row i becomes what was row `rows[i]`; int64 on the CPU. Call before `pack`."""
        weight = self.weight.data
        weight.copy_(weight[rows.to(weight.device)])

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] -> [..., out_features], same dtype."""
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")
        if few_rows(x, self.weight):
            return self.small(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)
        return F.linear(x, self.weight)

    def small(self, x: Tensor, norm: RMSNorm | None = None, **around: Any) -> Tensor:
        """The product of few rows, x [T, in_features], with what `small_product` does `around` it."""
        from denim.layers.kernels.small_product import small_product

        if norm is not None:
            around |= {"scale": norm.scale, "eps": norm.eps}
        return small_product(x, self.weight, arrivals=self.arrivals, **around)

    def project(self, x: Tensor, *, norm: RMSNorm | None = None, add: Tensor | None = None) -> Tensor:
        """add + norm(x) Wᵀ in as few kernels as the device allows; without `norm` or `add` that part is left
        out.

        x: [T, in_features]; add: [T, out_features]. `add` is given up: the result may lie in its memory.
        Fused parts are rounded once, at the end.
        """
        if few_rows(x, self.weight):
            return self.small(x, norm, add=add)
        if norm is not None:
            x = norm(x)
        if add is None:
            return self(x)
        if x.is_cuda and self.weight.numel():
            return add.addmm_(x, self.weight.t())
        return add + self(x)

    def wide(self, x: Tensor) -> Tensor:
        """x Wᵀ in fp32, on CUDA as it was accumulated. x: [T, in_features] -> [T, out_features]."""
        if few_rows(x, self.weight):
            return self.small(x, out_dtype=torch.float32)
        if x.is_cuda and self.weight.numel() and x.dtype != torch.float32:
            return torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        return self(x).float()
