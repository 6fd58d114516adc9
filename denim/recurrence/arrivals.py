"""Counters by which the programs of a fused decode step that share a key head find the last of them.

Owns how many there are. A step of few rows spreads each state over several programs; with more there are
enough without, and no counter. Each layer has counters of its own, since its kernel may begin before the end
of the one before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

# States [d_v, d_k] of all rows together below which each is spread over programs; measured on an H200.
SPREAD_BELOW = 512


def new_arrivals(key_heads: int, value_heads: int, device: torch.device | str) -> Tensor:
    """[most rows that are spread, key_heads] int32, all zero, as every step leaves them."""
    return torch.zeros(-(-SPREAD_BELOW // value_heads), key_heads, dtype=torch.int32, device=device)
