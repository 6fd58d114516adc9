"""The fused decode step of lightning attention against the plain parts that it stands for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from denim.recurrence.gated_accumulation import gated_accumulation_step
from denim.recurrence.kernels.lightning_step import lightning_step_fused
from tests.recurrence.kernels.slots import BOUND, DEVICE, DTYPES, check_close, check_slots, slots_of

EPS = 1e-6
SIZES = [(4, 16), (3, 24)]
if DEVICE == "cuda":
    SIZES += [(64, 128)]  # MiniMax


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads, dim", SIZES)
def test_equals_the_plain_parts(heads: int, dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [3, -1, 8, 0]
    projected = torch.randn(len(rows), 4 * heads * dim, generator=generator).to(dtype)
    log_decay = -torch.rand(heads, generator=generator)
    scale = 1 + 0.3 * torch.randn(heads * dim, generator=generator)
    states = torch.randn(len(rows), heads, dim, dim, generator=generator)
    state = slots_of(rows, states)
    moved = (t.to(DEVICE) for t in (projected, log_decay, scale))
    out = lightning_step_fused(*moved, EPS, torch.tensor(rows, device=DEVICE), state)
    qkv, gate = projected.float().split((3 * heads * dim, heads * dim), -1)
    q, k, v = F.silu(qkv).view(-1, heads, 3 * dim).chunk(3, -1)
    y = gated_accumulation_step(q, k, v, log_decay, states, scale=1.0)
    want = (F.rms_norm(y.flatten(1), (heads * dim,), scale, EPS) * gate.sigmoid()).to(dtype)
    live = [0, 2, 3]
    check_close(out[live], want[live], BOUND[dtype])
    check_slots(state, rows, states, BOUND[dtype])
