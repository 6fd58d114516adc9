"""The decode step for few rows on Hopper where there is none: which steps it takes, and that it compiles.

What it computes is tested on a device, in tests/gpu/test_hopper_delta_spread.py.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from denim.recurrence.kernels.hopper_delta_spread import programs_of, suits


def test_what_suits() -> None:
    for group, most in ((1, 8), (2, 4), (4, 4)):
        state = torch.zeros(1, 16 * group, 128, 128)
        assert suits(state, 1, 16) and suits(state, most, 16) and not suits(state, most + 1, 16)
    assert suits(torch.zeros(1, 16, 128, 128).bfloat16(), 1, 16)
    assert not suits(torch.zeros(1, 6, 128, 128), 1, 2)  # three value heads a key head
    assert not suits(torch.zeros(1, 16, 128, 64), 1, 16)


def test_rows_of_states_divide_among_programs() -> None:
    for group in (1, 2, 4):
        for heads in (1, 16, 64, 65, 128):
            for vector_decay in (False, True) if group == 1 else (False,):
                assert 128 * group % (programs_of(heads, group, vector_decay) * 4 * 4) == 0


COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from denim.recurrence.kernels.hopper_delta_spread import _step as kernel

constants = dict(key_heads=4, group={group}, vector_decay={vector}, floored=False, width=4)
constants |= dict(sigmoid_gate={vector}, programs={programs})
types = dict(slots_ptr="*i64", state_ptr="*fp32")
types |= dict.fromkeys(("a_log_ptr", "norm_ptr"), "*fp32")
types["dt_bias_ptr"] = "*fp32" if {vector} else "*bf16"
signature = {{}}
for argument in kernel.arg_names:
    kind = "*bf16" if argument.endswith("_ptr") else "i32" if argument.endswith("_stride") else "fp32"
    signature[argument] = "constexpr" if argument in constants else types.get(argument, kind)
places = {{(kernel.arg_names.index(name),): value for name, value in constants.items()}}
source = GluonASTSource(kernel, signature, places, {{}})
options = dict(num_warps=4, num_ctas={programs})
made = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
assert "st.async" in made.asm["ptx"] and "barrier.cluster" in made.asm["ptx"]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "vector", "programs"), [(1, False, 4), (2, False, 8), (4, False, 8), (1, True, 4), (1, True, 8)]
)
def test_it_compiles(group: int, vector: bool, programs: int) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    code = COMPILE.format(group=group, vector=vector, programs=programs)
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
