"""Matrix products with weights that do not change: y = x Wᵀ.

Owns the storage of one weight [out, in] and, on a CPU in bf16, its oneDNN-packed copy. Knows nothing of
what the weight means. A fused projection is one `Linear` whose rows are several published tensors; the
loader fills row slices of `weight` (see `denim.models.weights`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# oneDNN chooses the packed layout for a row count. Packed for one row, products of 1 and of 8 rows run
# at 1.7 and 2.2 times the speed of the plain weight, and products of 512 rows no slower (measured on a
# two-core AVX512-BF16 machine); packed for 8 or 512 rows, single rows gain nothing.
PACKED_FOR_ROWS = 1


def can_pack(weight: Tensor) -> bool:
    """Whether packing helps: bf16 on a CPU with oneDNN. fp32 keeps the plain product."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


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
        return F.linear(x, self.weight)
