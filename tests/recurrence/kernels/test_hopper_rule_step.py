"""The rule alone for Hopper where there is none: which states it takes, and that it compiles.

What it computes is tested on a device, in tests/gpu/test_delta_rule_step.py.
"""

from __future__ import annotations

import pytest
import torch

from denim.recurrence.kernels.hopper_rule_step import suits
from tests.hopper_compiler import check_compiles


def test_what_suits() -> None:
    state = torch.zeros(1, 16, 128, 128)
    assert suits(state, 64)
    assert not suits(state, 63)
    assert not suits(state.bfloat16(), 64)
    assert not suits(torch.zeros(1, 16, 128, 64), 64)


@pytest.mark.slow
@pytest.mark.parametrize("vector", [False, True], ids=["scalar", "vector"])
def test_it_compiles(vector: bool) -> None:
    constants = {"key_heads": 4, "group": 2, "vector_decay": vector}
    types = {"_ptr": "*bf16", "slots_ptr": "*i64", "state_stride": "i32", "scale": "fp32"}
    types |= dict.fromkeys(("state_ptr", "log_decay_ptr", "beta_ptr"), "*fp32")
    needs = ["griddepcontrol.wait"]
    check_compiles("recurrence.kernels.hopper_rule_step", "_step", constants, types, needs, num_warps=1)
