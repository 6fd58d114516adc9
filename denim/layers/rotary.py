"""Rotary position embedding of the leading part of each head, with YaRN scaling.

RoPE: Su et al. 2021 (arXiv 2104.09864), in the half-split form of Qwen and Llama. YaRN: Peng et al.
2023 (arXiv 2309.00071): high frequencies are kept, low ones are stretched by `factor`, with a linear
ramp between the dimensions that turn `beta_fast` and `beta_slow` times within the original context.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from denim.recurrence.backend import in_kernels
from denim.spec.model import Rope


def inverse_frequencies(rope: Rope, rotary_dim: int, device: torch.device | str) -> tuple[Tensor, float]:
    """Frequencies [rotary_dim / 2] in fp32, and the factor that cosine and sine are multiplied with."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    kept = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return kept, 1.0

    def dimension(turns: float) -> float:
        """The (fractional) frequency index whose wave turns `turns` times in the original context."""
        wavelength = rope.original_max_position / (turns * 2 * math.pi)
        return rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp; avoids a division by zero
    index = torch.arange(rotary_dim // 2, dtype=torch.float32, device=device)
    stretched_share = ((index - low) / (high - low)).clamp(0, 1)
    frequencies = kept / rope.factor * stretched_share + kept * (1 - stretched_share)
    return frequencies, _attention_factor(rope)


def _attention_factor(rope: Rope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


class Rotary:
    """Cosines and sines for positions, for all attention layers of a model at once."""

    def __init__(self, rope: Rope, rotary_dim: int, device: torch.device | str):
        self.frequencies, self.factor = inverse_frequencies(rope, rotary_dim, device)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [T] -> cos, sin [T, 1, rotary_dim / 2], computed in fp32, returned in `dtype`."""
        if in_kernels(positions):
            from denim.layers.kernels.rotary_angles import rotary_angles

            return rotary_angles(positions, self.frequencies, self.factor, dtype)
        angle = positions.float()[:, None, None] * self.frequencies
        return (angle.cos() * self.factor).to(dtype), (angle.sin() * self.factor).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first 2·cos.shape[-1] entries of every head. x: [T, heads, head_dim]."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
