"""The states of a batch of decode rows, wherever they lie: one tensor, or slots of an arena.

Owns how a step reaches them without copying. Must not know any rule.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from denim.recurrence.sequences import WORK_DTYPES


def blocks_of(state: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """`state`, [B, *state] or B tensors [*state], as views [b, *state] that are each dense as a whole.

    One block if the rows lie one behind the other; else one for each row, since a product over rows that
    lie apart would copy them. Each row has to be dense.
    """
    if isinstance(state, Tensor) and state.stride(0) == state[0].numel():
        return [state]
    return [row.unsqueeze(0) for row in state]


def widened(blocks: Sequence[Tensor]) -> Tensor | None:
    """The states in fp32 if theirs is no dtype to compute in, else None. `write_back` returns them."""
    return None if blocks[0].dtype in WORK_DTYPES else torch.cat(list(blocks)).float()


def write_back(wide: Tensor, blocks: Sequence[Tensor]) -> None:
    """Rounds `wide` into the blocks that it was widened from."""
    for block, result in zip(blocks, wide.split(len(blocks[0])), strict=True):
        block.copy_(result)
