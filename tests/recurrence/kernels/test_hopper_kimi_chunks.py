"""KDA's kernel for Hopper where there is none: what suits, and that it compiles.

What it computes is tested on a device, in tests/gpu/test_hopper_kimi_chunks.py.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.kernels.hopper_kimi_chunks import suits


def test_what_suits() -> None:
    rows, f = torch.zeros(80, 400).bfloat16(), torch.zeros(80, 144).bfloat16()
    state = torch.zeros(2, 1, 128, 128)
    table = ChunkTable.of([0, 80], [0], [1], 64, "cpu")
    assert suits(rows[:, :384], f[:, :128], table, state)
    assert not suits(rows[:, :384], f[:, :128].float(), table, state)
    assert not suits(rows[:, :384], f[:, 4:132], table, state)  # begins between multiples of 16 bytes
    for narrower in (8, 4):
        assert not suits(rows[:, :384], f[:, narrower:].contiguous(), table, state)
        assert not suits(rows[:, narrower:].contiguous(), f[:, :128], table, state)


COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout
from denim.recurrence.kernels.hopper_kimi_chunks import _chunk_matrices as kernel

constants = dict(heads=4, {more})
types = dict(chunks_ptr="*i32", a_log_ptr="*fp32", dt_bias_ptr="*fp32", left_ptr="*fp32")
types |= dict(strength_ptr="*fp32")
signature = {{}}
for argument in kernel.arg_names:
    kind = "*bf16" if argument.endswith("_ptr") else "i32" if argument.endswith("_stride") else "fp32"
    if argument.endswith("_desc"):
        kind = f"tensordesc<bf16[64, 64],{{NVMMASharedLayout(128, 16, 2)!r}}>"
    signature[argument] = "constexpr" if argument in constants else types.get(argument, kind)
places = {{(kernel.arg_names.index(name),): value for name, value in constants.items()}}
aligned = [
    n for n, name in enumerate(kernel.arg_names) if signature[name][0] == "*" or name.endswith("_stride")
]
source = GluonASTSource(kernel, signature, places, {{(n,): [["tt.divisibility", 16]] for n in aligned}})
made = compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4))
assert "wgmma" in made.asm["ptx"] and "mma.sync" in made.asm["ptx"]
"""


@pytest.mark.slow
@pytest.mark.parametrize("more", ["floor=None", ""], ids=["softplus", "floor"])
def test_it_compiles(more: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    code = COMPILE.format(more=more)
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
