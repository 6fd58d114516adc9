"""The product of few rows on Hopper where there is none: how products are cut up, and that it compiles.

What it computes is tested on a device, in tests/gpu/test_hopper_few_rows.py.
"""

from __future__ import annotations

import pytest
import torch

from denim.layers.kernels import hopper_few_rows
from denim.layers.kernels.hopper_few_rows import Cut, _swizzled, cut_of
from tests.hopper_compiler import check_compiles


def cut(rows: int, n: int, k: int, *, gated: bool = False, dtype: torch.dtype = torch.bfloat16) -> Cut | None:
    weight = torch.empty(2 * n if gated else n, k, dtype=dtype)
    return cut_of(torch.empty(rows, k, dtype=dtype), weight, n, gated)


def test_how_products_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cut(8, 1024, 1024) is None  # not on a CPU
    monkeypatch.setattr(hopper_few_rows, "on_hopper", lambda device: True)
    # Qwen3.5-0.8B: into the mixer and out of it, into the network and out of it, the head
    assert cut(32, 8224, 1024) == Cut(1, 4)
    assert cut(32, 1024, 2048) == Cut(4, 7)
    assert cut(32, 3584, 1024, gated=True) == Cut(1, 4)
    assert cut(64, 1024, 3584) == Cut(4, 4)
    assert cut(32, 248320, 1024) is None
    # Qwen3.5-9B
    assert cut(8, 4096, 4096) == Cut(2, 7)
    assert cut(8, 12288, 4096, gated=True) is None
    assert cut(1, 1024, 1024) is None and cut(65, 1024, 1024) is None
    assert cut(8, 1024, 1000) is None and cut(8, 1024, 1024, dtype=torch.float32) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("k", "rows", "programs", "gated", "added"),
    [
        (1024, 8, 1, False, False),
        (1024, 64, 1, True, False),
        (3584, 32, 4, False, True),
        (192, 16, 2, True, True),
    ],
)
def test_compiles_without_a_device(k: int, rows: int, programs: int, gated: bool, added: bool) -> None:
    sides = 2 if gated else 1
    constants = {"k": k, "rows": rows, "programs": programs, "stages": 4, "gated": gated, "added": added}
    types = {"_ptr": "*bf16", "gate_scale": "fp32", "": "i32"}
    types["x_desc"] = f"tensordesc<bf16[2, {rows}, 64],{_swizzled(3, programs)!r}>"
    types["weight_desc"] = f"tensordesc<bf16[2, {sides}, {64 // sides}, 64],{_swizzled(4, programs)!r}>"
    needs = ["wgmma", "cp.async.bulk.tensor", *(["st.async"] if programs > 1 else [])]
    module = "layers.kernels.hopper_few_rows"
    check_compiles(module, "_few_rows", constants, types, needs, num_warps=4, num_ctas=programs)
