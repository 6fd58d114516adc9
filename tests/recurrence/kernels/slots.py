"""Slots of an arena for tests of kernels, and how close a kernel must come.

Slots are views with gaps between them, NaN where no row lives. Closeness is the norm of the difference over
the norm of what is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS = 12
# The interpreter neither rounds to bf16 nor multiplies it.
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
BOUND = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}


def slots_of(rows: Sequence[int], values: Tensor) -> Tensor:
    """[SLOTS, *shape] with values[i] in slot rows[i]; negative rows have none."""
    shape = (SLOTS, values.shape[1] + 2, *values.shape[2:])
    view = torch.full(shape, torch.nan, dtype=values.dtype, device=DEVICE)[:, 1:-1]
    for slot, value in zip(rows, values, strict=True):
        if slot >= 0:
            view[slot] = value
    return view


def check_close(got: Tensor, want: Tensor, bound: float) -> None:
    assert got.shape == want.shape
    off = (got.double().cpu() - want.double().cpu()).norm() / want.double().cpu().norm()
    assert off <= bound, f"off by {off:.2e} of the norm, more than {bound:.0e}"  # NaN fails too


def check_slots(view: Tensor, rows: Sequence[int], want: Tensor | Sequence[Tensor], bound: float) -> None:
    """want[i] lies in slot rows[i], and nothing but the poison elsewhere."""
    for slot in range(SLOTS):
        if slot in rows:
            check_close(view[slot], want[list(rows).index(slot)], bound)
        else:
            assert view[slot].isnan().all()
