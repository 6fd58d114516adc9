"""The ways to keep a state of the precision study.

Owns one function each from a state in fp32 to the fp32 value of what would be stored. Must not know the rule
that makes the state. States are [..., d_v, d_k], a head each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448
INT8_MAX = 127
LOWER_HALF = 1 << 16  # what bf16 cuts off the 32 bits of an fp32 number

Kept = Callable[[Tensor, torch.Generator], Tensor]


class Storage(NamedTuple):
    """`kept` is applied behind every token, or `once`: at the checkpoint, with fp32 before and behind it."""

    name: str
    kept: Kept
    once: bool = False


def float32(state: Tensor, generator: torch.Generator) -> Tensor:
    return state


def bfloat16(state: Tensor, generator: torch.Generator) -> Tensor:
    """To the nearest bf16 number."""
    return state.bfloat16().float()


def bfloat16_stochastic(state: Tensor, generator: torch.Generator) -> Tensor:
    """To one of the two neighbours in bf16, with the probabilities that make the mean exact.

    A random number below 2^16 is added to the bits, then the lower 16 are cut off; sign and magnitude are
    apart in a float, so this rounds the magnitude.
    """
    noise = torch.randint(
        LOWER_HALF, state.shape, dtype=torch.int32, generator=generator, device=state.device
    )
    return ((state.view(torch.int32) + noise) & -LOWER_HALF).view(torch.float32)


def float8(state: Tensor, generator: torch.Generator) -> Tensor:
    """To the nearest e4m3 number, under a scale per head that puts its largest element at 448."""
    scale = _scale(state, FP8_MAX)
    return (state / scale).to(torch.float8_e4m3fn).float() * scale


def int8(state: Tensor, generator: torch.Generator) -> Tensor:
    """To whole numbers from -127 to 127, under a scale per head."""
    scale = _scale(state, INT8_MAX)
    return (state / scale).round() * scale


def _scale(state: Tensor, largest: float) -> Tensor:
    tiny = torch.finfo(torch.float32).tiny  # a head that is all zeros stays so
    return (state.abs().amax((-2, -1), keepdim=True) / largest).clamp_min(tiny)


STORAGES = (
    Storage("fp32", float32),
    Storage("bf16", bfloat16),
    Storage("bf16 stochastic", bfloat16_stochastic),
    Storage("fp8", float8),
    Storage("fp8 once", float8, once=True),
    Storage("int8 once", int8, once=True),
)
