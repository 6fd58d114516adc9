"""KDA's kernel for Hopper where there is none: what suits, and that it compiles.

What it computes is tested on a device, in tests/gpu/test_hopper_kimi_chunks.py.
"""

from __future__ import annotations

import pytest
import torch
from triton.experimental.gluon.language import NVMMASharedLayout

from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.kernels.hopper_kimi_chunks import suits
from tests.hopper_compiler import check_compiles


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


@pytest.mark.slow
@pytest.mark.parametrize("floored", [False, True])
def test_it_compiles(floored: bool) -> None:
    constants = {"heads": 4} if floored else {"heads": 4, "floor": None}
    types = {"_ptr": "*bf16", "_stride": "i32", "": "fp32", "chunks_ptr": "*i32"}
    types |= dict.fromkeys(("a_log_ptr", "dt_bias_ptr", "left_ptr", "strength_ptr"), "*fp32")
    types["_desc"] = f"tensordesc<bf16[64, 64],{NVMMASharedLayout(128, 16, 2)!r}>"
    kernel = ("recurrence.kernels.hopper_kimi_chunks", "_chunk_matrices")
    check_compiles(*kernel, constants, types, ["wgmma", "mma.sync"], aligned=True, num_warps=4)
