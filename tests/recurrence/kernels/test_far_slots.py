"""Slots whose place in memory passes 2^31 elements: kernels do there what they do with slots close together.

What is not touched of the large buffer takes no memory.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.kernels.accumulation_chunks import TimeStep, accumulation_chunks
from denim.recurrence.kernels.lightning_step import lightning_step
from denim.recurrence.kernels.selective_scan_chunks import selective_scan_chunks
from denim.recurrence.kernels.selective_scan_step import selective_scan_step_fused
from denim.recurrence.kernels.ssd_step import ssd_step_fused
from tests.recurrence.kernels.slots import DEVICE

PITCH = 2**31 // 4  # so that slot 4 is the first whose place a signed 32-bit number does not hold
HEADS, DIM, CHANNELS, STATES = 2, 16, 16, 4
SSD_CHANNELS = 3 * HEADS * DIM  # as many groups as heads


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def table() -> ChunkTable:
    """Sequences from nothing to slot 2, from slot 1 to slot 0 and in slot 4; the first is also saved in 3."""
    saves = [((2, 3),), (), ()]
    return ChunkTable.of([0, 3, 20, 40], [-1, 1, 4], [2, 0, 4], 16, DEVICE, saves)


SLOTS = torch.tensor([4, 1], device=DEVICE)
BIAS = randn(HEADS)
KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "ssd step": lambda window, state, _: ssd_step_fused(
        randn(2, HEADS * DIM + SSD_CHANNELS + HEADS),
        randn(SSD_CHANNELS, 4),
        None,
        *(BIAS, BIAS, BIAS),
        *(None, 0.0, 1, False),
        SLOTS,
        window,
        state,
        HEADS,
    ),
    "lightning step": lambda _, state, __: lightning_step(
        randn(2, 3 * HEADS * DIM), -BIAS.abs(), SLOTS, state
    ),
    "scan step": lambda _, __, state: selective_scan_step_fused(
        *randn(2, 2, CHANNELS),
        *randn(2, CHANNELS)[:1],
        randn(CHANNELS, STATES),
        randn(CHANNELS),
        randn(2, 2 * STATES),
        *(None, None, None),
        randn(2, CHANNELS),
        SLOTS,
        state,
    ),
    "ssd chunks": lambda _, state, __: accumulation_chunks(
        *randn(3, 40, HEADS, DIM), BIAS, table(), state, time_step=TimeStep(randn(40, HEADS), BIAS)
    ),
    "lightning chunks": lambda _, state, __: accumulation_chunks(
        *randn(3, 40, HEADS, DIM), -BIAS.abs(), table(), state
    ),
    "scan chunks": lambda _, __, state: selective_scan_chunks(
        *randn(2, 40, CHANNELS),
        *randn(2, CHANNELS)[:1],
        randn(CHANNELS, STATES),
        randn(CHANNELS),
        randn(40, 2 * STATES),
        *(None, None, None),
        randn(40, CHANNELS),
        table(),
        state,
    ),
}


def spread(tensors: list[Tensor]) -> list[Tensor]:
    """The same slots, PITCH elements apart, in one buffer."""
    buffer = torch.empty(4 * PITCH + sum(t[0].numel() for t in tensors), device=DEVICE)
    views, first = [], 0
    for tensor in tensors:
        view = buffer.as_strided(tensor.shape, (PITCH, *tensor.stride()[1:]), first)
        views.append(view.copy_(tensor))
        first += tensor[0].numel()
    return views


@pytest.mark.parametrize("name", KERNELS)
def test_far_slots_are_as_good_as_near_ones(name: str) -> None:
    near = [randn(5, 3, SSD_CHANNELS), randn(5, HEADS, DIM, DIM), randn(5, CHANNELS, STATES)]
    far = spread(near)
    assert torch.equal(KERNELS[name](*far), KERNELS[name](*near))
    for a, b in zip(far, near, strict=True):
        assert torch.equal(a, b)
