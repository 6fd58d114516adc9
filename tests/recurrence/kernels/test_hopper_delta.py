"""The gated delta rule's kernels for Hopper where there is none: what suits, what is cut, and that they
compile.

What they compute is tested on a device, in tests/gpu/test_hopper_delta.py.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.kernels.hopper_delta import span_of, suits


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


COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout
from denim.recurrence.kernels.hopper_delta_{file} import {name} as kernel

constants = dict(heads=4, key_heads=2, {more})
types = dict(a_ptr="*bf16", b_ptr="*bf16", dt_bias_ptr="*bf16", out_ptr="*bf16", span="i32")
types |= dict(slot_in_ptr="*i64", slot_out_ptr="*i64", save_ptr="*i64", gate_stride="i32", state_stride="i32")
types |= dict(chunks_ptr="*i32", first_chunk_ptr="*i32", scale="fp32", beta_limit="fp32", least="fp32")
signature = {{}}
for argument in kernel.arg_names:
    kind = types.get(argument, "*fp32")
    if argument.endswith("_desc"):
        kind = f"tensordesc<bf16[64, 64],{{NVMMASharedLayout(128, 16, 2)!r}}>"
    signature[argument] = "constexpr" if argument in constants else kind
places = {{(kernel.arg_names.index(name),): value for name, value in constants.items()}}
source = GluonASTSource(kernel, signature, places, {{}})
made = compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4))
assert "wgmma" in made.asm["ptx"] and "cp.async.bulk.tensor" in made.asm["ptx"]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "name", "more"),
    [
        ("chunks", "chunk_matrices", ""),
        ("walk", "walk_chunks", "stages=3, outputs=True, save_ptr=None, between_ptr=None, maps_ptr=None"),
        ("walk", "walk_chunks", "stages=3, outputs=True"),
        ("walk", "walk_chunks", "stages=3, outputs=False, save_ptr=None"),
    ],
)
def test_they_compile(file: str, name: str, more: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    code = COMPILE.format(file=file, name=name, more=more)
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
