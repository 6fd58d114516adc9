"""States out of slots and back, in Triton's interpreter on the CPU. What nobody may touch holds NaN."""

import math

import torch

from denim.recurrence.kernels.slot_copy import gather_slots, scatter_slots

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = (2, 7, 3)


def slots_of(*slots):
    return torch.tensor(slots, device=DEVICE)


def poisoned(count, dtype=torch.float32):
    """`count` slots with a gap behind each, as the arena has them."""
    numbers = math.prod(SHAPE)
    return torch.full((count, numbers + 5), math.nan, dtype=dtype, device=DEVICE)[:, :numbers].view(
        count, *SHAPE
    )


def test_gather_reads_zeros_for_no_slot():
    state = poisoned(4)
    state[2] = torch.randn(SHAPE)
    out = gather_slots(state, slots_of(-1, 2))
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert torch.equal(out[1], state[2])


def test_scatter_writes_its_slots_alone():
    state, dense = poisoned(4, torch.float16), torch.randn(3, *SHAPE, device=DEVICE)
    scatter_slots(dense, slots_of(3, -1, 0), state)
    assert torch.equal(state[3], dense[0].half())
    assert torch.equal(state[0], dense[2].half())
    assert state[1:3].isnan().all()
