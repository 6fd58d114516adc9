"""The decode step for Hopper where there is none: which states it takes, and that it compiles.

What it computes is tested on a device, in tests/gpu/test_hopper_delta_step.py.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from denim.recurrence.kernels.state_ring import suits


def test_what_suits() -> None:
    state = torch.zeros(2, 3, 128, 128)
    assert suits(state)
    assert suits(torch.zeros(2, 5, 128, 128)[:, 1:4])
    assert not suits(state.bfloat16())
    assert not suits(torch.zeros(2, 3, 128, 64))
    assert not suits(torch.zeros(2, 3 * 128 * 128 + 16)[:, :-16].view(2, 3, 128, 128))  # slots between pieces
    assert not suits(torch.zeros(2 * 3 * 128 * 128 + 1)[1:].view(2, 3, 128, 128))  # not at 16 bytes


COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout
from denim.recurrence.kernels.hopper_delta_step import _step as kernel

constants = dict(key_heads=4, group={group}, vector_decay={vector}, floored=False, width=4, stages=3)
constants |= dict(sigmoid_gate={vector}, length={length}, padded={padded})
types = dict(slots_ptr="*i64", pending_ptr="*i32", between="i32", rows="i32")
types |= dict.fromkeys(("a_log_ptr", "norm_ptr", "keys_ptr", "updates_ptr", "decays_ptr"), "*fp32")
if {length} == 0:
    constants |= dict.fromkeys(("pending_ptr", "keys_ptr", "updates_ptr", "decays_ptr"))
types["desc"] = f"tensordesc<fp32[256, 32],{{NVMMASharedLayout(128, 32, 2)!r}}>"
types["dt_bias_ptr"] = "*fp32" if {vector} else "*bf16"
signature = {{}}
for argument in kernel.arg_names:
    kind = "*bf16" if argument.endswith("_ptr") else "i32" if argument.endswith("_stride") else "fp32"
    signature[argument] = "constexpr" if argument in constants else types.get(argument, kind)
places = {{(kernel.arg_names.index(name),): value for name, value in constants.items()}}
source = GluonASTSource(kernel, signature, places, {{}})
made = compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=8))
assert "cp.async.bulk.tensor" in made.asm["ptx"] and made.metadata.shared < 227 << 10
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "vector", "length", "padded"),
    [(1, False, 0, 1), (2, False, 5, 4), (1, True, 0, 1), (1, True, 9, 8), (1, False, 2, 1)],
)
def test_it_compiles(group: int, vector: bool, length: int, padded: int) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    code = COMPILE.format(group=group, vector=vector, length=length, padded=padded)
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
