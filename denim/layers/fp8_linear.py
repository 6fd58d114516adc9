"""Matrix products with weights in FP8 blocks, as the checkpoint has them.

Owns the storage of such a weight, the quantisation of activations, and the product, which is torch's own
(cuBLASLt's, of Hopper alone). The recipe is DeepSeek-V3's (arXiv 2412.19437, section 3.3): weights in blocks
of 128 x 128, activations for each token in groups of 128 channels, each with one fp32 scale, sums in fp32.
Knows nothing of files or of which projections come in FP8.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from denim.layers.linear import Linear
from denim.recurrence.backend import in_kernels
from denim.recurrence.kernels.hopper import on_hopper

BLOCK = 128
LARGEST = 448.0  # of float8_e4m3fn
SMALLEST = 1e-10  # magnitude that a scale stands for: keeps a group of zeros from dividing by zero

# What cuBLASLt asks of scales: those of activations stand for a multiple of 4 rows, those of a row of weight
# blocks begin at a multiple of 4 (cuBLAS manual, "1D and 2D block scaling for FP8 data types").
SCALE_MULTIPLE = 4
CUDA_WITH_BLOCKS = (12, 9)


@cache
def multiplies_blocks(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch multiplies FP8 blocks on this device with results in `dtype`: bf16 on Hopper."""
    return (
        on_hopper(device)
        and dtype == torch.bfloat16
        and torch.version.cuda is not None
        and tuple(map(int, torch.version.cuda.split(".")[:2])) >= CUDA_WITH_BLOCKS
        and hasattr(F, "scaled_mm")
    )


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] -> FP8 values [M', K] and their scales [M', K / 128] in fp32, one behind the other by columns.

    M' is M rounded up to a multiple of 4; what the rows behind M hold has no meaning.
    """
    rows, columns = x.shape
    padded = -(-rows // SCALE_MULTIPLE) * SCALE_MULTIPLE
    if in_kernels(x):
        from denim.layers.kernels.fp8_quantise import quantise_rows

        values = torch.empty(padded, columns, dtype=torch.float8_e4m3fn, device=x.device)
        scales = torch.empty(columns // BLOCK, padded, dtype=torch.float32, device=x.device)
        quantise_rows(x, values, scales, size=BLOCK, largest=LARGEST, smallest=SMALLEST)
        return values, scales.t()
    groups = F.pad(x, (0, 0, 0, padded - rows)).float().unflatten(1, (-1, BLOCK))
    scale = groups.abs().amax(-1).clamp(min=SMALLEST) / LARGEST
    values = (groups / scale[..., None]).flatten(1).to(torch.float8_e4m3fn)
    return values, scale.t().contiguous().t()


def product(values: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """x Wᵀ in bf16, [M', N], of what `quantise` returned and an `Fp8Linear`'s weight and scales."""
    return F.scaled_mm(
        values,
        weight.t(),
        scales,
        F.ScalingType.BlockWise1x128,
        weight_scales.t(),
        F.ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )


def dequantised(values: Tensor, scales: Tensor) -> Tensor:
    """values [rows, columns], multiples of 128; scales [rows / 128, columns / 128 or more] -> fp32."""
    columns = values.shape[1] // BLOCK
    blocks = values.float().unflatten(1, (columns, BLOCK)).unflatten(0, (-1, BLOCK))
    return (blocks * scales[:, None, :columns, None]).flatten(2).flatten(0, 1)


class Fp8Linear(Linear):
    """y = x Wᵀ without bias, where the first rows of W are FP8 blocks and the rest, if any, is plain.

    values  [quantised, in_features] float8_e4m3fn; both are multiples of 128
    scales  [quantised / 128, in_features / 128 rounded up to a multiple of 4] fp32; what rounding adds is 0
    plain   [out_features - quantised, in_features] in the dtype of the activations

    `weight` is empty.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        quantised: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        super().__init__(in_features, 0, dtype=dtype, device=device)
        assert quantised and quantised % BLOCK == in_features % BLOCK == 0
        self.out_features = out_features
        self.quantised = quantised
        stride = -(-in_features // (BLOCK * SCALE_MULTIPLE)) * SCALE_MULTIPLE
        fp8 = torch.empty(quantised, in_features, dtype=torch.float8_e4m3fn, device=device)
        scales = torch.zeros(quantised // BLOCK, stride, dtype=torch.float32, device=device)
        plain = torch.empty(out_features - quantised, in_features, dtype=dtype, device=device)
        self.values = nn.Parameter(fp8, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.plain = nn.Parameter(plain, requires_grad=False)

    def pack(self, *, keep: bool = False) -> None:
        """Nothing: the weight is as the product wants it."""

    def reorder_rows(self, rows: Tensor) -> None:
        """As of a plain weight; when blocks would be torn apart, no row stays in FP8."""
        blocks = rows[: self.quantised].view(-1, BLOCK)
        whole = (blocks == blocks[:, :1] + torch.arange(BLOCK)).all() and not (blocks[:, 0] % BLOCK).any()
        if not whole or int(blocks.max()) >= self.quantised:
            self._dequantise()
            blocks = blocks[:0]
        device = self.values.device
        as_bytes = self.values.data.view(torch.uint8)  # torch moves rows of bytes on every device
        as_bytes.copy_(as_bytes[rows[: self.quantised].to(device)])
        self.scales.data.copy_(self.scales.data[blocks[:, 0].to(device) // BLOCK])
        self.plain.data.copy_(self.plain.data[(rows[self.quantised :] - self.quantised).to(device)])

    def _dequantise(self) -> None:
        meant = dequantised(self.values.data, self.scales.data).to(self.plain.dtype)
        self.plain.data = torch.cat((meant, self.plain.data))
        self.values.data, self.scales.data = self.values.data[:0].clone(), self.scales.data[:0].clone()
        self.quantised = 0

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] -> [..., out_features], same dtype."""
        rows = x.reshape(-1, self.in_features)
        parts = []
        if self.quantised:
            parts.append(product(*quantise(rows), self.values, self.scales)[: len(rows)])
        if self.quantised < self.out_features:
            parts.append(F.linear(rows, self.plain))
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return out.view(*x.shape[:-1], self.out_features)
