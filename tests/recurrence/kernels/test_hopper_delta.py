"""The gated delta rule's kernels for Hopper where there is none: what suits, what is cut, and that they
compile.

What they compute is tested on a device, in tests/gpu/test_hopper_delta.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.experimental.gluon.language import NVMMASharedLayout

from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.kernels.hopper_delta import span_of, suits
from tests.hopper_compiler import check_compiles


def test_what_suits() -> None:
    rows, state = torch.zeros(80, 3 * 128).bfloat16(), torch.zeros(2, 1, 128, 128)

    def table(size: int) -> ChunkTable:
        return ChunkTable.of([0, 80], [0], [1], size, "cpu")

    assert suits(rows, table(64), state)
    assert suits(rows[3:], table(64), state)
    assert not suits(rows.float(), table(64), state)
    assert not suits(rows, table(32), state)
    assert not suits(rows, table(64), torch.zeros(2, 1, 128, 64))
    assert not suits(rows[:, 4:], table(64), state)  # begins between multiples of 16 bytes
    assert not suits(rows[:, :-4].contiguous(), table(64), state)


@pytest.mark.parametrize(
    ("walks", "longest", "span"),
    [
        (16, 512, 103),  # five segments: 16 x 7 programs of the first walk for 132 multiprocessors
        (32, 512, 171),
        (16, 32, 7),
        (16, 8, 0),  # segments would be too short
        (256, 32, 0),  # there is enough to do
    ],
)
def test_segments(walks: int, longest: int, span: int) -> None:
    assert span_of(walks, longest, 132) == span


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "name", "more"),
    [
        ("chunks", "chunk_matrices", {}),
        ("walk", "walk_chunks", dict.fromkeys(("save_ptr", "between_ptr", "maps_ptr")) | {"outputs": True}),
        ("walk", "walk_chunks", {"outputs": True}),
        ("walk", "walk_chunks", {"outputs": False, "save_ptr": None}),
    ],
    ids=str,
)
def test_they_compile(file: str, name: str, more: dict[str, Any]) -> None:
    constants = {"heads": 4, "key_heads": 2, **more}
    if file == "walk":
        constants["stages"] = 3
    types = {"_ptr": "*fp32", "_stride": "i32", "": "fp32", "span": "i32"}
    types |= dict.fromkeys(("a_ptr", "b_ptr", "dt_bias_ptr", "out_ptr"), "*bf16")
    types |= dict.fromkeys(("slot_in_ptr", "slot_out_ptr", "save_ptr"), "*i64")
    types |= dict.fromkeys(("chunks_ptr", "first_chunk_ptr"), "*i32")
    types["_desc"] = f"tensordesc<bf16[64, 64],{NVMMASharedLayout(128, 16, 2)!r}>"
    needs = ["wgmma", "cp.async.bulk.tensor"]
    check_compiles(f"recurrence.kernels.hopper_delta_{file}", name, constants, types, needs, num_warps=4)
