"""The fused KDA step against the plain parts that it stands for; interpreted on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from denim.recurrence.deferred import Ring, flush
from denim.recurrence.gated_delta import gated_delta_step, l2norm
from denim.recurrence.kernels.delta_tile import Tiling
from denim.recurrence.kernels.kimi_delta_step import kimi_delta_step_fused
from denim.recurrence.short_conv import short_conv_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
SLOTS = 9


@dataclass
class Case:
    """One layer's inputs for the rows of `slots`. Slots hold NaN where no row lives."""

    qkv: Tensor
    b: Tensor
    f: Tensor
    g: Tensor
    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    slots: Tensor
    window: Tensor
    state: Tensor
    floor: float | None = None

    @classmethod
    def random(cls, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, slots: list[int]) -> Case:
        torch.manual_seed(0)
        rows, keys, values = len(slots), heads * key_dim, heads * value_dim
        channels = 2 * keys + values
        window = torch.full((SLOTS, 4, channels), float("nan"), dtype=dtype)[:, 1:]
        state = torch.full((SLOTS, heads + 1, value_dim, key_dim), float("nan"))[:, 1:]
        for slot in slots:
            if slot >= 0:
                window[slot] = torch.randn(3, channels).to(dtype)
                state[slot] = torch.randn(heads, value_dim, key_dim)
        case = cls(
            *[torch.empty(0)] * 4,
            torch.randn(channels, 4).to(dtype),
            torch.randn(heads),
            torch.randn(keys),
            1 + 0.3 * torch.randn(value_dim),
            torch.tensor(slots),
            window,
            state,
        )
        case.token(rows, dtype)
        return case

    def token(self, rows: int, dtype: torch.dtype) -> None:
        """New inputs, parts of one projection's rows but for g."""
        heads, value_dim, key_dim = self.state.shape[1:]
        widths = (len(self.conv), heads, heads * key_dim)
        self.qkv, self.b, self.f = torch.randn(rows, sum(widths)).to(dtype).split(widths, dim=1)
        self.g = torch.randn(rows, heads * value_dim).to(dtype)

    def plain(self) -> tuple[Tensor, Tensor, Tensor]:
        """Output, windows and states by the plain parts; rows of padding are left out."""
        live = self.slots >= 0
        slots = self.slots[live]
        heads, value_dim, key_dim = self.state.shape[1:]
        window, state = self.window.clone(), self.state.clone()
        rows = window[slots]
        mixed = F.silu(short_conv_step(self.qkv[live], self.conv, rows))
        window[slots] = rows
        keys = heads * key_dim
        q, k, v = mixed.float().split((keys, keys, heads * value_dim), dim=-1)
        q, k = (l2norm(part.reshape(-1, heads, key_dim)) for part in (q, k))
        biased = (self.f[live].float() + self.dt_bias).view(-1, heads, key_dim)
        rate = self.a_log.exp().unsqueeze(-1)
        if self.floor is None:
            log_decay = -rate * F.softplus(biased)
        else:
            log_decay = self.floor * torch.sigmoid(rate * biased)
        current = state[slots]
        beta = self.b[live].float().sigmoid()
        out = gated_delta_step(q, k, v.reshape(-1, heads, value_dim), log_decay, beta, current)
        state[slots] = current
        out = F.rms_norm(out, (value_dim,), self.norm, EPS)
        out = out * self.g[live].float().sigmoid().view_as(out)
        return out.flatten(1).to(self.qkv.dtype), window, state

    def fused(
        self, tiling: Tiling | None = None, ring: Ring | None = None, pending: Tensor | None = None
    ) -> Tensor:
        """The kernel's output; windows, states and the ring are updated in place."""
        token = (self.qkv, self.b, self.f, self.g)
        weights = (self.conv.t().contiguous(), self.a_log, self.dt_bias, self.norm)
        slots, window, state = (t.to(DEVICE) for t in (self.slots, self.window, self.state))
        arrivals = torch.zeros(len(slots), state.shape[1], dtype=torch.int32, device=DEVICE)
        out = kimi_delta_step_fused(
            *(t.to(DEVICE) for t in (*token, *weights)),
            EPS,
            slots,
            window,
            state,
            arrivals,
            self.floor,
            ring,
            pending,
            tiling,
        )
        assert not arrivals.any()
        self.window, self.state = window.cpu(), state.cpu()
        return out.cpu()


SIZES = [(2, 16, 16), (1, 24, 40)]
if DEVICE == "cuda":
    SIZES += [(32, 128, 128)]


@pytest.mark.parametrize("floor", [None, -5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_equals_the_plain_parts(sizes: tuple[int, int, int], dtype: torch.dtype, floor: float | None) -> None:
    case = Case.random(*sizes, dtype, slots=[3, -1, 8, 0])
    case.floor = floor
    expected, window, state = case.plain()
    out = case.fused()
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(out[[0, 2, 3]], expected, **tolerance)
    torch.testing.assert_close(case.window, window, equal_nan=True, atol=0, rtol=0)
    torch.testing.assert_close(case.state, state, equal_nan=True, **tolerance)


@pytest.mark.parametrize("tiling", [Tiling(4, 1), Tiling(4, 1, 8), Tiling(16, 4)], ids=str)
def test_tilings(tiling: Tiling) -> None:
    case = Case.random(2, 16, 12, torch.float32, slots=[5])
    expected, window, state = case.plain()
    torch.testing.assert_close(case.fused(tiling), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(case.window, window, equal_nan=True, atol=0, rtol=0)
    torch.testing.assert_close(case.state, state, equal_nan=True, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tiling", [Tiling(8, 2), Tiling(16, 4)], ids=str)
def test_deferred_writes(tiling: Tiling) -> None:
    """Steps with records equal steps that write; one row forgets all in every third step."""
    length, pending = 3, torch.tensor([0, 0], dtype=torch.int32, device=DEVICE)
    case = Case.random(2, 16, 12, torch.float32, slots=[3, 8])
    every = Case.random(2, 16, 12, torch.float32, slots=[3, 8])
    shapes = ((2, 16), (2, 12), (2, 16))
    ring = Ring(*(torch.full((SLOTS, length, *shape), float("nan"), device=DEVICE) for shape in shapes))
    for step in range(5):
        case.token(2, torch.float32)
        case.f[0] += 3000.0 if step % 3 == 1 else -3.0
        every.qkv, every.b, every.f, every.g = case.qkv, case.b, case.f, case.g
        before = case.state.clone()
        expected, every.window, every.state = every.plain()
        out = case.fused(tiling, ring, pending)
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(case.window, every.window, equal_nan=True, atol=0, rtol=0)
        for row, slot in enumerate(case.slots.tolist()):
            if pending[row] < length - 1:
                torch.testing.assert_close(case.state[slot], before[slot], atol=0, rtol=0)
        pending = (pending + 1) % length
    flush(case.state, Ring(*(part.cpu() for part in ring)), case.slots, pending.cpu())
    torch.testing.assert_close(case.state, every.state, equal_nan=True, atol=2e-5, rtol=2e-5)
