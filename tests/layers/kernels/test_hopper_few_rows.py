"""The product of few rows on Hopper where there is none: how products are cut up, and that it compiles.

What it computes is tested on a device, in tests/gpu/test_hopper_few_rows.py.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from denim.layers.kernels import hopper_few_rows
from denim.layers.kernels.hopper_few_rows import Cut, cut_of


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


COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from denim.layers.kernels.hopper_few_rows import _few_rows as kernel, _swizzled

sides = 2 if {gated} else 1
constants = dict(k={k}, rows={rows}, programs={programs}, stages=4, gated={gated}, added={added})
types = dict(add_ptr="*bf16", out_ptr="*bf16", gate_scale="fp32")
types["x_desc"] = f"tensordesc<bf16[2, {rows}, 64],{{_swizzled(3, {programs})!r}}>"
types["weight_desc"] = f"tensordesc<bf16[2, {{sides}}, {{64 // sides}}, 64],{{_swizzled(4, {programs})!r}}>"
signature = {{}}
for argument in kernel.arg_names:
    signature[argument] = "constexpr" if argument in constants else types.get(argument, "i32")
places = {{(kernel.arg_names.index(name),): value for name, value in constants.items()}}
source = GluonASTSource(kernel, signature, places, {{}})
made = compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4, num_ctas={programs}))
assert "wgmma" in made.asm["ptx"] and ("st.async" in made.asm["ptx"]) == ({programs} > 1)
"""


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
def test_compiles_without_a_device(
    k: int, rows: int, programs: int, gated: bool, added: bool, tmp_path: object
) -> None:
    """In a process of its own: elsewhere Triton may have been told to interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    code = COMPILE.format(k=k, rows=rows, programs=programs, gated=gated, added=added)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
