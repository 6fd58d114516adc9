"""The fused decode step against the plain parts that it stands for; in Triton's interpreter on a CPU."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from denim.recurrence.deferred import Ring, flush
from denim.recurrence.kernels.delta_tile import Tiling
from tests.recurrence.kernels.delta_case import DEVICE, Case

KDA: dict[str, Any] = {"vector_decay": True}
# Key heads, value heads for each, d_k, d_v; and the gates. The published sizes where a GPU makes it quick.
LAYERS: list[tuple[tuple[int, int, int, int], dict[str, Any]]] = [
    ((2, 1, 16, 16), {}),
    ((2, 3, 16, 12), {}),
    ((1, 2, 24, 40), {}),
    ((2, 1, 16, 16), KDA),
    ((1, 1, 24, 40), KDA),
    ((2, 1, 16, 16), {**KDA, "decay_floor": -5.0}),
    ((1, 1, 24, 40), {**KDA, "decay_floor": -5.0}),
]
if DEVICE == "cuda":
    LAYERS += [((16, 1, 128, 128), {}), ((16, 2, 128, 128), {})]
    LAYERS += [((32, 1, 128, 128), {**KDA, "decay_floor": floor}) for floor in (None, -5.0)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize(("sizes", "gates"), LAYERS, ids=str)
def test_equals_the_plain_parts(
    sizes: tuple[int, int, int, int], gates: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    Case(*sizes, dtype, [3, -1, 8, 0], **gates).check(tolerance)


@pytest.mark.parametrize("tiling", [Tiling(4, 1), Tiling(8, 2), Tiling(4, 1, 8), Tiling(16, 4)], ids=str)
@pytest.mark.parametrize(("group", "gates"), [(3, {}), (1, KDA)], ids=["gated", "kda"])
def test_tilings(group: int, gates: dict[str, Any], tiling: Tiling) -> None:
    """Heads spread over one program or several."""
    Case(2, group, 16, 12, torch.float32, [3, -1, 8], **gates).check(1e-5, tiling)


@pytest.mark.parametrize(("tiling", "length"), [(Tiling(8, 2), 3), (Tiling(16, 4), 6)], ids=str)
@pytest.mark.parametrize(("heads", "gates"), [((1, 2), {}), ((2, 1), KDA)], ids=["gated", "kda"])
def test_deferred_writes(heads: tuple[int, int], gates: dict[str, Any], tiling: Tiling, length: int) -> None:
    """Steps with records equal steps that write, whenever each row's records are written."""
    pending = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    case, every = (Case(*heads, 16, 12, torch.float32, [3, -1, 0], **gates) for _ in range(2))
    ring = case.new_ring(length)
    for part in ring:
        part[0, :2] = 0.0  # two records of the last row that add nothing
    for step in range(length + 2):
        case.new_token()
        qkv, z, b, a = case.inputs[:4]
        a[:, : a.shape[1] // 2] = 80.0 if step % 2 else -80.0  # strong and weak decays in turn
        every.change(qkv=qkv, z=z, b=b, a=a)
        before = case.inputs.state.clone()
        expected, window, state = every.plain()
        every.change(window=window, state=state)
        out = case.fused(tiling, ring, pending)
        torch.testing.assert_close(out[[0, 2]], expected, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(case.inputs.window, window, equal_nan=True, atol=0, rtol=0)
        for row, slot in enumerate(case.inputs.slots.tolist()):
            if slot >= 0 and pending[row] < length - 1:
                assert torch.equal(case.inputs.state[slot], before[slot])
        pending = (pending + 1) % length
    records = Ring(*(part.cpu() for part in ring))
    flush(case.inputs.state, records, case.inputs.slots, pending.cpu())
    torch.testing.assert_close(case.inputs.state, every.inputs.state, equal_nan=True, atol=2e-5, rtol=2e-5)


def test_beta_between_0_and_2() -> None:
    """OLMo-hybrid; with b = 8 the part of the state along k changes its sign."""
    case = Case(2, 3, 16, 12, torch.float32, [3, 8, 0], beta_limit=2.0)
    case.inputs.b[:] = 8.0
    case.check(1e-5)


def test_strong_and_absent_decay_stay_finite() -> None:
    case = Case(1, 2, 16, 16, torch.float32, [1])
    case.change(a_log=torch.tensor([6.0, -40.0]))
    case.inputs.a[:] = torch.tensor([80.0, -80.0])
    case.check(1e-5)


def test_kernels_are_not_imported_by_the_plain_engine() -> None:
    """A CPU needs no Triton."""
    code = (
        "import sys, denim.engine.core; sys.exit('denim.recurrence.kernels.fused_delta_step' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
