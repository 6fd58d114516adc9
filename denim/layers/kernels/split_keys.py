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

# Splits are multiples of this, and every block of keys divides it.
SPLIT_STEP = tl.constexpr(128)
LEAST_DOT = 16  # the shortest side of a product on tensor cores


@triton.jit
def cdiv(a, b):
    return (a + b - 1) // b


@triton.jit
def split_of(kv_len, tiles, kv_heads: tl.constexpr, wave, least: tl.constexpr, most: tl.constexpr):
    """Keys of a split of a span with so many keys and tiles: `wave` units, but none of fewer than `least` or
    more than `most` keys."""
    wanted = cdiv(cdiv(kv_len * tiles * kv_heads, wave), SPLIT_STEP) * SPLIT_STEP
    return tl.minimum(tl.maximum(wanted, least), most)


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


class Cut(NamedTuple):
    """How finely keys are cut: each decode row, or all segments together, into about `wave` units over all KV
    heads, of least .. most keys."""

    wave: int
    least: int
    most: int


def most_units(spans: int, tokens: int, group: int, kv_heads: int, rows: int, cut: Cut) -> int:
    """No fewer than the units, over all KV heads, of `spans` segments with `tokens` tokens together, `group`
    query heads to a KV head and `rows` rows to a tile, where splits may be as long as they like. A segment of
    t tiles that is to be w units has at most w / (t · kv_heads) + 1 splits."""
    return kv_heads * (tokens * group // rows + spans) + max(cut.wave, spans)


def kept_units(cut: Cut) -> int:
    """No fewer than the units of segments that leave partial sums: one that is to be w units is split only if
    its tiles are fewer."""
    return 2 * cut.wave


def kept_decode_units(rows: int, keys: int, kv_heads: int, cut: Cut) -> int:
    """The same of `rows` decode rows with `keys` keys together: a row of k keys has at most
    wave / kv_heads + k / most + 1 splits."""
    return rows * (cut.wave + kv_heads) + kv_heads * -(-keys // cut.most)


def kept_floats(units: int, rows: int, dim: int) -> int:
    """Numbers of partial sums that so many units leave, each of at most `rows` rows."""
    return units * rows * max(LEAST_DOT, triton.next_power_of_2(dim))
