"""The fused decode step against the plain parts that it stands for, in Triton's interpreter on the CPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from denim.recurrence.deferred import Ring, flush
from denim.recurrence.gated_delta import gated_delta_step, l2norm
from denim.recurrence.kernels.delta_tile import Tiling
from denim.recurrence.kernels.gated_delta_step import gated_delta_step_fused
from denim.recurrence.short_conv import short_conv_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
SLOTS = 9


@dataclass
class Case:
    """One layer's inputs for B rows. Slots hold NaN where no row lives."""

    key_heads: int
    projected: Tensor
    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    slots: Tensor
    window: Tensor
    state: Tensor
    beta_limit: float = 1.0

    @classmethod
    def random(
        cls, key_heads: int, group: int, key_dim: int, value_dim: int, dtype: torch.dtype, slots: list[int]
    ) -> Case:
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        heads = key_heads * group
        channels = 2 * key_heads * key_dim + heads * value_dim
        rows = len(slots)
        # Views with gaps, as an arena gives them.
        window = torch.full((SLOTS, 5, channels), float("nan"), dtype=dtype)[:, 1:4]
        state = torch.full((SLOTS, heads + 2, value_dim, key_dim), float("nan"))[:, :heads]
        for slot in slots:
            if slot >= 0:
                window[slot] = randn(3, channels).to(dtype)
                state[slot] = randn(heads, value_dim, key_dim)
        return cls(
            key_heads,
            randn(rows, channels + heads * value_dim + 2 * heads).to(dtype),
            randn(channels, 4).to(dtype),
            randn(heads),
            randn(heads).to(dtype),
            1 + 0.3 * randn(value_dim),
            torch.tensor(slots),
            window,
            state,
        )

    def plain(self) -> tuple[Tensor, Tensor, Tensor]:
        """Output, windows and states by the plain parts; rows of padding are left out."""
        live = self.slots >= 0
        slots, x = self.slots[live], self.projected[live]
        heads, value_dim, key_dim = self.state.shape[1:]
        keys, values = self.key_heads * key_dim, heads * value_dim
        qkv, z, b, a = x.split((2 * keys + values, values, heads, heads), dim=-1)
        window, state = self.window.clone(), self.state.clone()
        rows = window[slots]
        mixed = F.silu(short_conv_step(qkv, self.conv, rows))
        window[slots] = rows
        q, k, v = mixed.float().split((keys, keys, values), dim=-1)
        q, k = (l2norm(t.reshape(-1, self.key_heads, key_dim)) for t in (q, k))
        log_decay = -self.a_log.exp() * F.softplus(a.float() + self.dt_bias.float())
        current = state[slots]
        beta = self.beta_limit * b.float().sigmoid()
        out = gated_delta_step(q, k, v.reshape(-1, heads, value_dim), log_decay, beta, current)
        state[slots] = current
        out = F.rms_norm(out, (value_dim,), self.norm, EPS) * F.silu(z.float()).view_as(out)
        return out.flatten(1).to(x.dtype), window, state

    def ring(self, length: int) -> Ring:
        """Records of the case's slots, none of them written yet."""
        _, heads, value_dim, key_dim = self.state.shape
        parts = ((self.key_heads, key_dim), (heads, value_dim), (heads,))
        return Ring(*(torch.full((SLOTS, length, *part), float("nan"), device=DEVICE) for part in parts))

    def fused(
        self,
        tiling: Tiling | None = None,
        ring: Ring | None = None,
        pending: Tensor | None = None,
    ) -> Tensor:
        """The kernel's output; windows, states and the ring are updated in place."""
        parts = (self.projected, self.conv.t().contiguous(), self.a_log, self.dt_bias, self.norm)
        moved = [t.to(DEVICE) for t in parts]
        self.slots, self.window, self.state = (t.to(DEVICE) for t in (self.slots, self.window, self.state))
        places = (self.slots, self.window, self.state)
        arrivals = torch.zeros(len(self.slots), self.key_heads, dtype=torch.int32, device=DEVICE)
        options = (self.beta_limit, ring, pending, tiling)
        out = gated_delta_step_fused(*moved, EPS, *places, arrivals, *options)
        assert not arrivals.any()
        self.window, self.state = self.window.cpu(), self.state.cpu()
        return out.cpu()


# Key heads, value heads for each, d_k, d_v; Qwen3.5's own where a GPU makes it quick.
SIZES = [(2, 1, 16, 16), (2, 3, 16, 12), (1, 2, 24, 40)]
if DEVICE == "cuda":
    SIZES += [(16, 1, 128, 128), (16, 2, 128, 128)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_equals_the_plain_parts(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    case = Case.random(*sizes, dtype, slots=[3, 8, 0])
    expected, window, state = case.plain()
    out = case.fused()
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(out, expected, **tolerance)
    torch.testing.assert_close(case.window, window, equal_nan=True, atol=0, rtol=0)
    torch.testing.assert_close(case.state, state, equal_nan=True, **tolerance)


@pytest.mark.parametrize("tiling", [Tiling(4, 1), Tiling(8, 2), Tiling(4, 1, 8), Tiling(16, 4)], ids=str)
def test_tilings(tiling: Tiling) -> None:
    """Heads spread over one program or several."""
    case = Case.random(2, 3, 16, 12, torch.float32, slots=[3, -1, 8, 0])
    expected, window, state = case.plain()
    out = case.fused(tiling)
    torch.testing.assert_close(out[[0, 2, 3]], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(case.window, window, equal_nan=True, atol=0, rtol=0)
    torch.testing.assert_close(case.state, state, equal_nan=True, atol=1e-5, rtol=1e-5)


def test_padding_rows_touch_nothing() -> None:
    case = Case.random(2, 2, 16, 16, torch.float32, slots=[4, -1, 2, -1])
    expected, window, state = case.plain()
    out = case.fused()
    torch.testing.assert_close(out[[0, 2]], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(case.window, window, equal_nan=True, atol=0, rtol=0)
    torch.testing.assert_close(case.state, state, equal_nan=True, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("tiling", "length"), [(Tiling(8, 2), 3), (Tiling(16, 4), 6)], ids=str)
def test_deferred_writes(tiling: Tiling, length: int) -> None:
    """Steps with records equal steps that write, whenever each row's records are written."""
    pending = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    case = Case.random(1, 2, 16, 12, torch.float32, slots=[3, -1, 0])
    every = Case.random(1, 2, 16, 12, torch.float32, slots=[3, -1, 0])
    ring = case.ring(length)
    for part in ring:
        part[0, :2] = 0.0  # two records of the last row that add nothing
    for step in range(length + 2):
        case.projected = every.projected = torch.randn_like(case.projected)
        case.projected[:, -2] = 80.0 if step % 2 else -80.0  # strong and weak decays in turn
        before = case.state.clone()
        out, expected = case.fused(tiling, ring, pending), every.fused()
        torch.testing.assert_close(out[[0, 2]], expected[[0, 2]], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(case.window, every.window, equal_nan=True, atol=0, rtol=0)
        for row, slot in enumerate(case.slots.tolist()):
            if slot >= 0 and pending[row] < length - 1:
                assert torch.equal(case.state[slot], before[slot])
        pending = (pending + 1) % length
    flush(case.state, Ring(*(part.cpu() for part in ring)), case.slots.cpu(), pending.cpu())
    torch.testing.assert_close(case.state, every.state, equal_nan=True, atol=2e-5, rtol=2e-5)


def test_beta_between_0_and_2() -> None:
    """OLMo-hybrid; with b = 8 the part of the state along k changes its sign."""
    case = Case.random(2, 3, 16, 12, torch.float32, slots=[3, 8, 0])
    case.beta_limit = 2.0
    case.projected[:, -12:-6] = 8.0
    expected, _, state = case.plain()
    torch.testing.assert_close(case.fused(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(case.state, state, equal_nan=True, atol=1e-5, rtol=1e-5)


def test_strong_and_absent_decay_stay_finite() -> None:
    case = Case.random(1, 2, 16, 16, torch.float32, slots=[1])
    case.a_log = torch.tensor([6.0, -40.0])
    case.projected[:, -2:] = torch.tensor([[80.0, -80.0]])
    expected, _, state = case.plain()
    torch.testing.assert_close(case.fused(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(case.state, state, equal_nan=True, atol=1e-5, rtol=1e-5)


def test_kernels_are_not_imported_by_the_plain_engine() -> None:
    """A CPU needs no Triton."""
    code = (
        "import sys, denim.engine.core; sys.exit('denim.recurrence.kernels.gated_delta_step' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
