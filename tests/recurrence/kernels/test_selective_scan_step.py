"""The decode step of the selective scan against the plain parts that it stands for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from denim.recurrence.kernels.selective_scan_step import selective_scan_step_fused
from denim.recurrence.selective_scan import selective_scan_step
from tests.recurrence.kernels.slots import BOUND, DEVICE, DTYPES, check_close, check_slots, slots_of

EPS = 1e-5
SIZES = [(20, 6), (140, 16)]
if DEVICE == "cuda":
    SIZES += [(8192, 16)]  # Jamba, Falcon-Mamba


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels, n", SIZES)
@pytest.mark.parametrize("norm", ["none", "plain", "weights"])
def test_equals_the_plain_parts(channels: int, n: int, dtype: torch.dtype, norm: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [3, -1, 8, 0, 5]
    x, dt, z = torch.randn(3, len(rows), channels, generator=generator).to(dtype)
    z = torch.cat((x, z), 1)[:, channels:]
    bias, d = torch.randn(2, channels, generator=generator)
    a_log = torch.rand(channels, n, generator=generator) * 3
    bc = torch.randn(len(rows), 2 * n + 4, generator=generator).to(dtype)[:, 4:]
    scales = 1 + 0.3 * torch.randn(2, n, generator=generator) if norm == "weights" else None
    states = torch.randn(len(rows), channels, n, generator=generator)
    state = slots_of(rows, states)
    eps = None if norm == "none" else EPS
    out = selective_scan_step_fused(
        *(t.to(DEVICE) for t in (x, dt, bias, a_log, d)),
        bc.to(DEVICE),
        eps,
        *((None, None) if scales is None else scales.to(DEVICE)),
        z.to(DEVICE),
        torch.tensor(rows, device=DEVICE),
        state,
    )
    b, c = bc.chunk(2, -1)
    if eps is not None:
        b, c = (
            F.rms_norm(t.float(), (n,), None if scales is None else scales[i], EPS).to(dtype)
            for i, t in enumerate((b, c))
        )
    delta = F.softplus(dt.float() + bias)
    y = selective_scan_step(x.float(), delta, -a_log.exp(), b.float(), c.float(), d, states)
    want = (y * F.silu(z.float())).to(dtype)
    live = [0, 2, 3, 4]
    check_close(out[live], want[live], BOUND[dtype])
    check_slots(state, rows, states, BOUND[dtype])
