"""The accumulation kernel against the rule token by token in float64."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.gated_accumulation import gated_accumulation_recurrent
from denim.recurrence.kernels import accumulation_chunks as kernel
from tests.recurrence.kernels.slots import BOUND, DEVICE, check_close, check_slots, slots_of

# The interpreter has no products of bf16.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
CU = [0, 1, 38, 38 + 33, 38 + 33 + 64]
# (slot_in, slot_out) of each sequence: fresh, carried in its own slot, carried from another's, fresh.
PLACES = [(-1, 3), (5, 5), (7, 2), (-1, 0)]


class Case:
    """Inputs of one call, in the layout that a layer has them: q, k and v are columns of one tensor."""

    def __init__(self, heads: int, key_heads: int, value_dim: int, key_dim: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        tokens, keys = CU[-1], key_heads * key_dim
        mixed = (
            torch.randn(tokens, heads * value_dim + 2 * keys + 3, generator=generator).to(dtype).to(DEVICE)
        )
        self.v = mixed[:, : heads * value_dim].unflatten(1, (heads, value_dim))
        self.k = mixed[:, heads * value_dim :][:, :keys].unflatten(1, (key_heads, key_dim))
        self.q = mixed[:, heads * value_dim + keys :][:, :keys].unflatten(1, (key_heads, key_dim))
        self.k *= key_dim**-0.5
        self.dt = torch.randn(tokens, heads, generator=generator).to(dtype).to(DEVICE)
        self.bias = torch.randn(heads, generator=generator).to(DEVICE)
        self.a_log = torch.randn(heads, generator=generator).to(DEVICE)
        self.skip = torch.randn(heads, generator=generator).to(DEVICE)
        self.dtype = dtype
        self.initial = torch.randn(len(PLACES), heads, value_dim, key_dim, generator=generator)
        self.initial[[slot_in < 0 for slot_in, _ in PLACES]] = 0
        self.carried = [slot_in for slot_in, _ in PLACES]
        self.states = slots_of(self.carried, self.initial)

    def reference(
        self, log_decay: Tensor, v: Tensor, saves: list[list[tuple[int, int]]]
    ) -> tuple[Tensor, dict]:
        wide = [t.double().cpu() for t in (self.q, self.k, v, log_decay)]
        initial = self.initial.double()
        at = [
            [*(place for place, _ in some), end - start]
            for some, (start, end) in zip(saves, pairwise(CU), strict=True)
        ]
        out, states = gated_accumulation_recurrent(
            *wide, cu_seqlens=CU, initial_state=initial, states_at=at, scale=1.0
        )
        slots = [
            slot
            for some, (_, slot_out) in zip(saves, PLACES, strict=True)
            for slot in (*(s for _, s in some), slot_out)
        ]
        return out, dict(zip(slots, states, strict=True))

    def check(self, out: Tensor, want: Tensor, states: dict[int, Tensor], bound: float) -> None:
        """Output, and in the slots: `states`, what sequences began from where nobody wrote, else poison."""
        check_close(out, want, bound)
        left = dict(zip(self.carried, self.initial, strict=True)) | states
        check_slots(self.states, list(left), list(left.values()), bound)

    def table(self, size: int, saves: list[list[tuple[int, int]]] | None) -> ChunkTable:
        return ChunkTable.of(CU, [a for a, _ in PLACES], [b for _, b in PLACES], size, DEVICE, saves)


SAVES = [[], [(3, 8), (32, 9), (35, 10)], [(1, 11)], []]
NO_SAVES: list[list[tuple[int, int]]] = [[], [], [], []]
# Heads, key heads, d_v, d_k.
SIZES = [(4, 2, 16, 16), (2, 1, 24, 20)]


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("saves", [None, SAVES], ids=["plain", "saves"])
def test_ssd(sizes: tuple[int, int, int, int], dtype: torch.dtype, saves: list | None) -> None:
    case = Case(*sizes, dtype)
    limit = (0.1, 2.0)
    delta = F.softplus(case.dt.double() + case.bias.double()).clamp(*limit)
    log_decay = -case.a_log.double().exp() * delta
    want, states = case.reference(log_decay, case.v.double() * delta.unsqueeze(-1), saves or NO_SAVES)
    want = want + (case.v.double() * case.skip.double().unsqueeze(-1)).cpu()
    step = kernel.TimeStep(case.dt, case.bias, limit)
    table = case.table(16, saves)
    out = kernel.accumulation_chunks(
        case.q, case.k, case.v, case.a_log, table, case.states, time_step=step, skip=case.skip
    )
    case.check(out, want, states, BOUND[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_constant_decay(dtype: torch.dtype) -> None:
    case = Case(4, 4, 16, 16, dtype)
    decay = -torch.tensor([0.0, 1e-3, 0.5, 40.0], device=DEVICE)
    want, states = case.reference(decay, case.v, SAVES)
    out = kernel.accumulation_chunks(case.q, case.k, case.v, decay, case.table(32, SAVES), case.states)
    case.check(out, want, states, BOUND[dtype])


@pytest.mark.parametrize("segments", [2, 3, 5])
@pytest.mark.parametrize("saves", [None, SAVES], ids=["plain", "saves"])
def test_segments(monkeypatch: pytest.MonkeyPatch, segments: int, saves: list | None) -> None:
    """Long sequences in segments beside short ones, which have fewer."""
    monkeypatch.setattr(kernel, "segments_of", lambda table, programs: segments)
    case = Case(4, 2, 16, 16, HALF)
    delta = F.softplus(case.dt.double() + case.bias.double())
    log_decay = -case.a_log.double().exp() * delta
    want, states = case.reference(log_decay, case.v.double() * delta.unsqueeze(-1), saves or NO_SAVES)
    step = kernel.TimeStep(case.dt, case.bias, (0.0, inf))
    out = kernel.accumulation_chunks(
        case.q, case.k, case.v, case.a_log, case.table(16, saves), case.states, time_step=step
    )
    case.check(out, want, states, BOUND[HALF])


def test_fp32_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence gives the same bits alone, beside others, and resumed on a chunk's boundary."""
    monkeypatch.setattr(kernel, "segments_of", lambda table, programs: 3)
    case = Case(4, 2, 16, 16, torch.float32)
    decay = -case.bias.abs()

    def run(first: int, end: int, slot_in: int) -> Tensor:
        table = ChunkTable.of([0, end - first], [slot_in], [3], 16, DEVICE)
        return kernel.accumulation_chunks(
            *(t[first:end] for t in (case.q, case.k, case.v)), decay, table, case.states
        )

    whole = run(0, 135, -1)
    parts = [run(0, 32, -1), run(32, 96, 3), run(96, 135, 3)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_strong_and_weak_decay_stay_exact(dtype: torch.dtype) -> None:
    """Heads that forget all, at every token or at some, and one that forgets nothing."""
    case = Case(4, 2, 16, 16, dtype)
    case.a_log = torch.tensor([8.0, 5.0, 0.0, -30.0], device=DEVICE)
    case.dt[:, 1] = torch.where(torch.arange(len(case.dt)) % 7 == 0, 20.0, -12.0).to(DEVICE)
    delta = F.softplus(case.dt.double() + case.bias.double())
    log_decay = -case.a_log.double().exp() * delta
    want, states = case.reference(log_decay, case.v.double() * delta.unsqueeze(-1), NO_SAVES)
    step = kernel.TimeStep(case.dt, case.bias)
    out = kernel.accumulation_chunks(
        case.q, case.k, case.v, case.a_log, case.table(32, None), case.states, time_step=step
    )
    # Sums of logs reach 40 x 32 here, and differences of such sums are exact to 6e-5 in fp32.
    case.check(out, want, states, max(BOUND[dtype], 5e-5))


def test_padding_writes_nothing() -> None:
    case = Case(4, 2, 16, 16, torch.float32)
    table = case.table(16, None)
    table = table._replace(slot_out=torch.tensor([3, -1, 2, -1], device=DEVICE))
    case.skip.zero_()
    want, states = case.reference(-case.bias.abs(), case.v, NO_SAVES)
    out = kernel.accumulation_chunks(case.q, case.k, case.v, -case.bias.abs(), table, case.states)
    out, want = (torch.cat([t[0:1], t[38:71]]) for t in (out, want))
    case.check(out, want, {3: states[3], 2: states[2]}, BOUND[torch.float32])


def test_segments_fill_the_device() -> None:
    def segments(lengths: list[int], programs: int) -> int:
        cu = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        none = [-1] * len(lengths)
        return kernel.segments_of(ChunkTable.of(cu, none, none, 64, "cpu"), programs)

    assert segments([32768], 32) == kernel.FILLING // 32
    assert segments([64 * kernel.LEAST_CHUNKS], 32) == 1  # too short
    assert segments([4096] * 16, 32) == 1  # enough programs
    assert segments([32768] + [64] * 7, 32) == segments([32768], 32)


def test_stages_fit_shared_memory() -> None:
    assert kernel.stages_of(128, 64, 128, 64, 2) == 3  # Nemotron-H, MiniMax
    assert kernel.stages_of(1024, 64, 128, 64, 2) == 2
    assert kernel.stages_of(128, 64, 256, 64, 2) == 2  # Falcon-H1
    assert kernel.stages_of(128, 64, 512, 64, 4) == 1
