"""The rule alone for Hopper where there is none: which states it takes, and that it compiles.

What it computes is tested on a device, in tests/gpu/test_delta_rule_step.py.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from denim.recurrence.kernels.hopper_rule_step import suits


def test_what_suits() -> None:
    state = torch.zeros(1, 16, 128, 128)
    assert suits(state, 64)
    assert not suits(state, 63)
    assert not suits(state.bfloat16(), 64)
    assert not suits(torch.zeros(1, 16, 128, 64), 64)


COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from denim.recurrence.kernels.hopper_rule_step import _step as kernel

constants = dict(key_heads=4, group=2, vector_decay={vector})
types = dict(slots_ptr="*i64", state_stride="i32", scale="fp32")
types |= dict.fromkeys(["state_ptr", "log_decay_ptr", "beta_ptr"], "*fp32")
types |= dict.fromkeys(constants, "constexpr")
signature = {{name: types.get(name, "*bf16") for name in kernel.arg_names}}
places = {{(kernel.arg_names.index(name),): value for name, value in constants.items()}}
source = GluonASTSource(kernel, signature, places, {{}})
made = compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=1))
assert "griddepcontrol.wait" in made.asm["ptx"]
"""


@pytest.mark.slow
@pytest.mark.parametrize("vector", [False, True], ids=["scalar", "vector"])
def test_it_compiles(vector: bool) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    code = COMPILE.format(vector=vector)
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
