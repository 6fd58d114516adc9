"""The decode step for Hopper where there is none: which states it takes, and that it compiles.

What it computes is tested on a device, in tests/gpu/test_hopper_delta_step.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.experimental.gluon.language import NVMMASharedLayout

from denim.recurrence.kernels.state_ring import suits
from tests.hopper_compiler import check_compiles


def test_what_suits() -> None:
    state = torch.zeros(2, 3, 128, 128)
    assert suits(state)
    assert suits(torch.zeros(2, 5, 128, 128)[:, 1:4])
    assert not suits(state.bfloat16())
    assert not suits(torch.zeros(2, 3, 128, 64))
    assert not suits(torch.zeros(2, 3 * 128 * 128 + 16)[:, :-16].view(2, 3, 128, 128))  # slots between pieces
    assert not suits(torch.zeros(2 * 3 * 128 * 128 + 1)[1:].view(2, 3, 128, 128))  # not at 16 bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "vector", "length", "padded"),
    [(1, False, 0, 1), (2, False, 5, 4), (1, True, 0, 1), (1, True, 9, 8), (1, False, 2, 1)],
)
def test_it_compiles(group: int, vector: bool, length: int, padded: int) -> None:
    constants: dict[str, Any] = {"key_heads": 4, "group": group, "vector_decay": vector, "floored": False}
    constants |= {"sigmoid_gate": vector, "width": 4, "stages": 3, "length": length, "padded": padded}
    records = ("keys_ptr", "updates_ptr", "decays_ptr")
    if length == 0:
        constants |= dict.fromkeys(("pending_ptr", *records))
    types = {"_ptr": "*bf16", "_stride": "i32", "": "fp32", "slots_ptr": "*i64", "pending_ptr": "*i32"}
    types |= {"between": "i32", "rows": "i32"} | dict.fromkeys(("a_log_ptr", "norm_ptr", *records), "*fp32")
    types["desc"] = f"tensordesc<fp32[256, 32],{NVMMASharedLayout(128, 32, 2)!r}>"
    types["dt_bias_ptr"] = "*fp32" if vector else "*bf16"
    kernel = ("recurrence.kernels.hopper_delta_step", "_step")
    check_compiles(*kernel, constants, types, ["cp.async.bulk.tensor"], num_warps=8)
