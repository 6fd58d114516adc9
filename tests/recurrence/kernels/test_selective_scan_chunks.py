"""The selective scan over whole sequences against the rule token by token in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.kernels import cuda_selective_scan
from denim.recurrence.kernels import selective_scan_chunks as kernel
from denim.recurrence.selective_scan import selective_scan_recurrent
from tests.recurrence.kernels.slots import BOUND, DEVICE, DTYPES, check_close, check_slots, slots_of

EPS = 1e-5
CU = [0, 1, 38, 38 + 33, 38 + 33 + 20]
SLOT_IN, SLOT_OUT = [-1, 5, 7, -1], [3, 5, 2, 0]
SAVES = [[], [(3, 8), (32, 9), (35, 10)], [(1, 11)], []]
# Warps of a program of NVIDIA's kernel; None: the portable one.
WARPS = [None, 4, 2] if DEVICE == "cuda" else [None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("warps", WARPS)
@pytest.mark.parametrize(
    "channels, n, norm, saves",
    [
        (20, 16, "none", None),
        (20, 16, "weights", SAVES),
        (10, 6, "plain", SAVES),
        (10, 3, "none", SAVES),
    ],
)
def test_equals_the_rule(
    monkeypatch: pytest.MonkeyPatch,
    channels: int,
    n: int,
    norm: str,
    saves: list | None,
    warps: int | None,
    dtype: torch.dtype,
) -> None:
    monkeypatch.setattr(kernel, "on_nvidia", lambda device: warps is not None)
    monkeypatch.setattr(cuda_selective_scan, "warps_of", lambda *_: warps)
    generator = torch.Generator().manual_seed(0)
    tokens = CU[-1]
    x, dt, z = torch.randn(3, tokens, channels, generator=generator).to(dtype)
    z = torch.cat((x, z), 1)[:, channels:]
    bias, d = torch.randn(2, channels, generator=generator)
    a_log = torch.rand(channels, n, generator=generator) * 6 - 3  # from almost no decay to a strong one
    bc = torch.randn(tokens, 2 * n + 4, generator=generator).to(dtype)[:, 4:]
    scales = 1 + 0.3 * torch.randn(2, n, generator=generator) if norm == "weights" else None
    initial = torch.randn(len(SLOT_IN), channels, n, generator=generator)
    initial[[slot < 0 for slot in SLOT_IN]] = 0
    state = slots_of(SLOT_IN, initial)
    eps = None if norm == "none" else EPS
    out = kernel.selective_scan_chunks(
        *(t.to(DEVICE) for t in (x, dt, bias, a_log, d)),
        bc.to(DEVICE),
        eps,
        *((None, None) if scales is None else scales.to(DEVICE)),
        z.to(DEVICE),
        ChunkTable.of(CU, SLOT_IN, SLOT_OUT, kernel.CHUNK_TOKENS, DEVICE, saves),
        state,
    )
    b, c = bc.chunk(2, -1)
    if eps is not None:
        b, c = (
            F.rms_norm(t.float(), (n,), None if scales is None else scales[i], EPS).to(dtype)
            for i, t in enumerate((b, c))
        )
    wanted = saves or [[], [], [], []]
    y, states = selective_scan_recurrent(
        x.double(),
        F.softplus(dt.double() + bias.double()),
        -a_log.double().exp(),
        b.double(),
        c.double(),
        d.double(),
        cu_seqlens=CU,
        initial_state=initial.double(),
        states_at=[
            [*(at for at, _ in some), end - start]
            for some, (start, end) in zip(wanted, pairwise(CU), strict=True)
        ],
    )
    check_close(out, y * F.silu(z.double()), BOUND[dtype])
    slots = [s for some, slot in zip(wanted, SLOT_OUT, strict=True) for s in (*(s for _, s in some), slot)]
    left = dict(zip(SLOT_IN, initial, strict=True)) | dict(zip(slots, states, strict=True))
    check_slots(state, list(left), list(left.values()), BOUND[torch.float32])


def test_threads_have_two_channels_where_programs_are_many() -> None:
    def warps(sequences: int, dtype: torch.dtype) -> int:
        cu = [256 * i for i in range(sequences + 1)]
        table = ChunkTable.of(cu, [-1] * sequences, range(sequences), kernel.CHUNK_TOKENS, "cpu")
        return cuda_selective_scan.warps_of(8192, table, dtype)

    assert [warps(sequences, torch.bfloat16) for sequences in (1, 3, 4, 16)] == [4, 4, 2, 2]
    assert warps(16, torch.float32) == 4
