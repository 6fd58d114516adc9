"""FP8 weights in blocks that share one scale, as fp32.

Owns the arithmetic of the format alone: weight = fp8 value x scale of its block, as in DeepSeek-V3
(arXiv 2412.19437, section 3.3) and the FP8 checkpoints of Qwen. Knows nothing of files or models.
"""

from __future__ import annotations

from torch import Tensor

SCALE_SUFFIX = "_scale_inv"
"""A scale's name is that of its weight and this; "inv" since it undoes the division at quantisation."""


def check_scale(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> None:
    """Raises ValueError if the scale has another shape than the weight's grid of blocks.

    weight: [..., rows, columns]; blocks begin at the first row and column; the last ones may be cut off.
    """
    rows, columns = weight.shape[-2:]
    expected = (*weight.shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
    if scale.shape != expected:
        raise ValueError(f"shape {list(scale.shape)}, expected {list(expected)} for blocks of {list(block)}")


def dequantise(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """weight: [..., rows, columns] float8_e4m3fn; scale: one number a block of `block` = (rows, columns).

    Returns fp32 in the weight's shape. Raises ValueError as `check_scale` does.
    """
    check_scale(weight, scale, block)
    rows, columns = weight.shape[-2:]
    scale = scale.float().repeat_interleave(block[0], -2)[..., :rows, :]
    return weight.float().mul_(scale.repeat_interleave(block[1], -1)[..., :columns])
