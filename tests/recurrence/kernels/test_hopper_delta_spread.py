"""The decode step for few rows on Hopper where there is none: which steps it takes, and that it compiles.

What it computes is tested on a device, in tests/gpu/test_hopper_delta_spread.py.
"""

from __future__ import annotations

import pytest
import torch

from denim.recurrence.kernels.hopper_delta_spread import programs_of, suits
from tests.hopper_compiler import check_compiles


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "vector", "programs"), [(1, False, 4), (2, False, 8), (4, False, 8), (1, True, 4), (1, True, 8)]
)
def test_it_compiles(group: int, vector: bool, programs: int) -> None:
    constants = {"key_heads": 4, "group": group, "vector_decay": vector, "floored": False}
    constants |= {"sigmoid_gate": vector, "width": 4, "programs": programs}
    types = {"_ptr": "*bf16", "_stride": "i32", "": "fp32", "slots_ptr": "*i64"}
    types |= dict.fromkeys(("state_ptr", "a_log_ptr", "norm_ptr"), "*fp32")
    types["dt_bias_ptr"] = "*fp32" if vector else "*bf16"
    kernel, needs = ("recurrence.kernels.hopper_delta_spread", "_step"), ["st.async", "barrier.cluster"]
    check_compiles(*kernel, constants, types, needs, num_warps=4, num_ctas=programs)
