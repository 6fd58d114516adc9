"""KDA's kernel for Hopper where there is none: that it compiles.

What it computes is tested on a device, in tests/gpu/test_hopper_kimi_chunks.py.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout
from denim.recurrence.kernels.hopper_kimi_chunks import _chunk_matrices as kernel

constants = dict(heads=4, {more})
types = dict(chunks_ptr="*i32", a_log_ptr="*fp32", dt_bias_ptr="*fp32", left_ptr="*fp32")
signature = {{}}
for argument in kernel.arg_names:
    kind = "*bf16" if argument.endswith("_ptr") else "i32" if argument.endswith("_stride") else "fp32"
    if argument.endswith("_desc"):
        kind = f"tensordesc<bf16[64, 64],{{NVMMASharedLayout(128, 16, 2)!r}}>"
    signature[argument] = "constexpr" if argument in constants else types.get(argument, kind)
places = {{(kernel.arg_names.index(name),): value for name, value in constants.items()}}
source = GluonASTSource(kernel, signature, places, {{}})
made = compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4))
assert "wgmma" in made.asm["ptx"] and "mma.sync" in made.asm["ptx"]
"""


@pytest.mark.slow
@pytest.mark.parametrize("more", ["floor=None", ""], ids=["softplus", "floor"])
def test_it_compiles(more: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    code = COMPILE.format(more=more)
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
