"""SSD, lightning and selective scan kernels at published sizes in bf16; their steps inside CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.gated_accumulation import gated_accumulation_chunked
from denim.recurrence.selective_scan import selective_scan_chunked

pytestmark = pytest.mark.gpu

BF16 = {"dtype": torch.bfloat16, "device": "cuda"}
FP32 = {"device": "cuda"}
BOUND = 4e-3  # of the norm, against float64
CU = [0, 1300, 1364, 1700]
SLOT_IN, SLOT_OUT = [4, -1, 5], [0, 1, 5]
SAVES = [[(64, 2), (1001, 3)], [], []]


def table(size: int) -> ChunkTable:
    return ChunkTable.of(CU, SLOT_IN, SLOT_OUT, size, "cuda", SAVES)


def check(out: Tensor, states: Tensor, want: Tensor, want_states: Tensor) -> None:
    slots = [s for some, slot in zip(SAVES, SLOT_OUT, strict=True) for s in (*(s for _, s in some), slot)]
    for a, b in ((out, want), (states[slots], want_states)):
        assert (a.double() - b).norm() <= BOUND * b.norm()


def reference_run(initial: Tensor) -> dict:
    ends = [end - start for start, end in pairwise(CU)]
    return {
        "cu_seqlens": CU,
        "initial_state": initial.double(),
        "states_at": [[*(at for at, _ in some), end] for some, end in zip(SAVES, ends, strict=True)],
    }


def starting(states: Tensor) -> Tensor:
    return torch.stack([states[s] if s >= 0 else torch.zeros_like(states[0]) for s in SLOT_IN])


@pytest.mark.parametrize("heads, groups, value_dim, key_dim", [(128, 8, 64, 128), (32, 1, 64, 256)])
def test_ssd(heads: int, groups: int, value_dim: int, key_dim: int) -> None:
    from denim.recurrence.kernels.accumulation_chunks import TimeStep, accumulation_chunks, chunk_tokens

    torch.manual_seed(0)
    x = torch.randn(CU[-1], heads, value_dim, **BF16)
    c, b = (torch.randn(CU[-1], groups, key_dim, **BF16) * key_dim**-0.5 for _ in range(2))
    dt, bias = torch.randn(CU[-1], heads, **BF16), torch.rand(heads, **FP32) * 4 - 6
    a_log, skip = torch.log(1 + 15 * torch.rand(heads, **FP32)), torch.ones(heads, **FP32)
    states = torch.randn(6, heads, value_dim, key_dim, **FP32)
    run = reference_run(starting(states))
    out = accumulation_chunks(
        c, b, x, a_log, table(chunk_tokens(x.dtype)), states, time_step=TimeStep(dt, bias), skip=skip
    )
    delta = F.softplus(dt.double() + bias.double()).unsqueeze(-1)
    wide = x.double()
    log_decay = -a_log.double().exp() * delta.squeeze(-1)
    want, final = gated_accumulation_chunked(
        c.double(), b.double(), wide * delta, log_decay, **run, scale=1.0
    )
    check(out, states, want + wide * skip.double().unsqueeze(-1), final)


def test_lightning() -> None:
    from denim.recurrence.kernels.accumulation_chunks import accumulation_chunks, chunk_tokens

    torch.manual_seed(0)
    q, k, v = F.silu(torch.randn(CU[-1], 64, 3 * 128, **BF16)).chunk(3, dim=-1)
    decay = -torch.logspace(-12, 0, 64, base=2, **FP32)
    states = torch.randn(6, 64, 128, 128, **FP32)
    run = reference_run(starting(states))
    out = accumulation_chunks(q, k, v, decay, table(chunk_tokens(q.dtype)), states)
    wide = (t.double() for t in (q, k, v, decay))
    check(out, states, *gated_accumulation_chunked(*wide, **run, scale=1.0))


def test_selective_scan() -> None:
    from denim.recurrence.kernels.selective_scan_chunks import CHUNK_TOKENS, selective_scan_chunks

    torch.manual_seed(0)
    channels, n = 8192, 16
    x, dt, z = torch.randn(3, CU[-1], channels, **BF16)
    bc, bias = torch.randn(CU[-1], 2 * n, **BF16), torch.rand(channels, **FP32) * 4 - 6
    a_log, skip = torch.arange(1, n + 1, **FP32).log().repeat(channels, 1), torch.ones(channels, **FP32)
    states = torch.randn(6, channels, n, **FP32)
    run = reference_run(starting(states))
    fixed = (bias, a_log, skip, bc, None, None, None)
    out = selective_scan_chunks(x, dt, *fixed, z, table(CHUNK_TOKENS), states)
    delta = F.softplus(dt.double() + bias.double())
    b, c = bc.double().chunk(2, dim=-1)
    y, final = selective_scan_chunked(x.double(), delta, -a_log.double().exp(), b, c, skip.double(), **run)
    check(out, states, y * F.silu(z.double()), final)


def ssd_step() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from denim.recurrence.kernels.ssd_step import ssd_step_fused

    projected = torch.randn(4, 8192 + 10240 + 128, **BF16)
    weight, ones = torch.randn(10240, 4, **BF16), torch.ones(8192, **FP32)
    head = torch.rand(3, 128, **FP32)
    return lambda slots, window, states: ssd_step_fused(
        projected, weight, None, *head, ones, 1e-5, 8, False, slots, window, states, 8
    )


def lightning_step() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from denim.recurrence.kernels.lightning_step import lightning_step_fused

    projected, ones = torch.randn(4, 4 * 8192, **BF16), torch.ones(8192, **FP32)
    decay = -torch.rand(64, **FP32)
    return lambda slots, _, states: lightning_step_fused(
        projected, decay, ones, 1e-6, slots, states.view(6, 64, 128, 128)
    )


def scan_step() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from denim.recurrence.kernels.selective_scan_step import selective_scan_step_fused
    from denim.recurrence.kernels.short_conv_step import short_conv_step_slots

    x, dt, z = torch.randn(3, 4, 8192, **BF16)
    bc, weight = torch.randn(4, 32, **BF16), torch.randn(8192, 4, **BF16)
    a_log, bias, skip = torch.rand(8192, 16, **FP32), torch.rand(8192, **FP32), torch.rand(8192, **FP32)

    def run(slots: Tensor, window: Tensor, states: Tensor) -> Tensor:
        mixed = short_conv_step_slots(x, weight, None, slots, window[..., :8192].contiguous(), silu=True)
        fixed = (bias, a_log, skip, bc, None, None, None)
        return selective_scan_step_fused(
            mixed, dt, *fixed, z, slots, states.view(6, -1)[:, : 8192 * 16].unflatten(1, (8192, 16))
        )

    return run


@pytest.mark.parametrize("make", [ssd_step, lightning_step, scan_step])
def test_steps_in_a_graph(make: Callable[[], Callable[[Tensor, Tensor, Tensor], Tensor]]) -> None:
    """Captured once, replayed with other slots: rows of padding among them write nothing."""
    torch.manual_seed(0)
    step = make()
    slots = torch.tensor([0, 1, 2, 3], device="cuda")
    window, states = torch.randn(6, 3, 10240, **BF16), torch.randn(6, 128, 64, 128, **FP32)
    step(slots, window.clone(), states.clone())  # compiles
    held = [window.clone(), states.clone()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(slots, *held)
    expected = [window.clone(), states.clone()]
    for chosen in ([5, 2, -1, 0], [1, -1, 5, 4], [0, 1, 2, 3]):
        slots.copy_(torch.tensor(chosen))
        graph.replay()
        want = step(slots, *expected)
        live = [row for row, slot in enumerate(chosen) if slot >= 0]
        assert torch.equal(out[live], want[live])
        for a, b in zip(held, expected, strict=True):
            assert torch.equal(a, b)
