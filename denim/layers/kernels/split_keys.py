"""How attention over pages is cut into units of work, and the workspace where parts of one row meet.

Owns the arithmetic that kernels and their callers share. A unit is (span, tile of its query rows, split of
its keys, KV head). How a span is cut depends on its own lengths only, so that a row's result, bit by bit,
does not depend on the other rows of a step.

Splits of one tile leave partial sums in the workspace; whichever program finishes last adds them up, in the
order of splits, and sets the tile's counter back to zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Units that keep a large device (132 multiprocessors) busy: one span alone is cut into about so many.
WAVE = 128
# Splits are multiples of this, and every block of keys divides it.
SPLIT_STEP = tl.constexpr(128)
LEAST_DOT = 16  # the shortest side of a product on tensor cores


@triton.jit
def cdiv(a, b):
    return (a + b - 1) // b


@triton.jit
def split_of(kv_len, tiles, kv_heads: tl.constexpr, wave, least: tl.constexpr):
    """Keys of a split of a span with so many keys and tiles, no fewer than `least`."""
    wanted = cdiv(cdiv(kv_len * tiles * kv_heads, wave), SPLIT_STEP) * SPLIT_STEP
    return tl.maximum(wanted, least)


class Workspace(NamedTuple):
    """`partial` and `stats`, fp32, may hold anything; `counters`, int32, are zero between launches."""

    partial: Tensor
    stats: Tensor
    counters: Tensor

    @classmethod
    def of(cls, floats: int, device: torch.device | str) -> Workspace:
        """Room for `floats` numbers of partial sums, of rows no shorter than LEAST_DOT."""
        rows = -(-floats // LEAST_DOT)
        return cls(
            torch.empty(floats, dtype=torch.float32, device=device),
            torch.empty(2 * rows, dtype=torch.float32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
        )


def most_units(spans: int, tokens: int, group: int, kv_heads: int, rows: int, wave: int) -> int:
    """No fewer than the units, over all KV heads, of `spans` spans with `tokens` tokens together, `group`
    query heads to a KV head and `rows` rows to a tile. A span of t tiles has at most wave / (t · kv_heads) +
    1 splits.
    """
    return kv_heads * (tokens * group // rows + spans) + spans * wave


def kept_floats(
    spans: int, group: int, dim: int, kv_heads: int, rows: int, wave: int, *, decode: bool
) -> int:
    """Numbers of partial sums that `spans` spans may leave. Only a span whose tiles are fewer than `wave` is
    split, so its units are fewer than 2 · wave; a decode row has one tile a KV head, or a few of a large
    group.
    """
    width = max(LEAST_DOT, triton.next_power_of_2(dim))
    if decode:
        return spans * (wave + kv_heads * -(-group // rows)) * min(group, rows) * width
    return spans * 2 * wave * rows * width
