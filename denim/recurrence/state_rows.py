"""The states of a batch of decode rows, wherever they lie: one tensor, or slots of an arena.

Owns how a step reaches them without copying, and the check that it can. Must not know any rule.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from denim.recurrence.operands import check_numbers
from denim.recurrence.sequences import WORK_DTYPES


def blocks_of(state: Tensor | Sequence[Tensor], shape: Sequence[int], like: Tensor) -> list[Tensor]:
    """`state`, [B, *state] or B tensors [*state], as views [b, *state] that are each dense as a whole.

    shape: [B, *state]; like: of the tokens, for the device. One block if the rows lie one behind the other;
    else one for each row, since a product over rows that lie apart would copy them; none if B = 0.
    ValueError for another shape, dtype or device, for rows that are not dense, and for two in one place.
    """
    if isinstance(state, Tensor):
        check_numbers("state", state, "the tokens", like)
        _check_shape("state", state, shape)
        if not len(state):
            return []
        if state.is_contiguous():
            return [state]
        if len(state) > 1 and state.stride(0) < state[0].numel():
            raise ValueError(
                "the rows of state lie in one place, where each must have its own; pass a clone()"
            )
        rows = list(state)
    elif not hasattr(state, "__iter__"):
        raise ValueError(f"state must be a torch.Tensor or a list of them; got {type(state).__name__}")
    else:
        rows = list(state)
        if len(rows) != shape[0]:
            raise ValueError(f"state must have a tensor for each of {shape[0]} rows; got {len(rows)}")
        for row in rows:
            check_numbers("a row of state", row, "the tokens", like)
            _check_shape("a row of state", row, shape[1:])
            if row.dtype != rows[0].dtype:
                raise ValueError(f"a row of state is {row.dtype}, the first {rows[0].dtype}; use one dtype")
        if len({row.data_ptr() for row in rows}) < len(rows):
            raise ValueError(
                "state has the same tensor twice, where each row must have its own; pass a clone()"
            )
    if not all(row.is_contiguous() for row in rows):
        raise ValueError(
            "each row of state must be dense, so that it can be changed in place; pass contiguous()"
        )
    return [row.unsqueeze(0) for row in rows]


def _check_shape(name: str, state: Tensor, shape: Sequence[int]) -> None:
    if state.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}; got {list(state.shape)}")


def widened(blocks: Sequence[Tensor]) -> Tensor | None:
    """The states in fp32 if theirs is no dtype to compute in, else None. `write_back` returns them."""
    return None if blocks[0].dtype in WORK_DTYPES else torch.cat(list(blocks)).float()


def write_back(wide: Tensor, blocks: Sequence[Tensor]) -> None:
    """Rounds `wide` into the blocks that it was widened from."""
    for block, result in zip(blocks, wide.split(len(blocks[0])), strict=True):
        block.copy_(result)
