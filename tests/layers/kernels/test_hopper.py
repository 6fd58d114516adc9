"""The kernels for Hopper where there is none: what they are told of pages, and that they compile.

What they compute is tested on a device, in tests/gpu/test_paged_attention_cuda.py.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from denim.layers.kernels.hopper_pages import page_rows, suits

PAGES, PAGE, HEADS, DIM = 5, 16, 2, 64


def pages() -> torch.Tensor:
    """KV of one of three layers, as a view of an arena."""
    arena = torch.randn(PAGES, 3, 2, PAGE, HEADS, DIM).bfloat16()
    return arena[:, 1]


def test_pages_as_rows() -> None:
    kv = pages()
    matrix, stride = page_rows(kv)
    assert matrix.base.data_ptr() == kv.data_ptr() and matrix.block_shape == [PAGE, 64]
    rows = torch.as_strided(kv, matrix.shape, matrix.strides)
    for page, side, token in [(0, 0, 0), (3, 0, 5), (4, 1, PAGE - 1)]:
        row = rows[page * stride + side * PAGE + token]
        assert torch.equal(row.view(HEADS, DIM), kv[page, side, token])
    assert (PAGES - 1) * stride + 2 * PAGE == matrix.shape[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without one")
def test_nothing_suits_a_cpu() -> None:
    kv = pages()
    assert not suits(kv[0, 0], kv)


COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout
from denim.layers.kernels.hopper_{name} import _{name} as kernel

constants = dict(kv_heads=2, group=3, dim=64, page_size=16, gated=True, {more})
types = dict(scale="fp32", partial_ptr="*fp32", stats_ptr="*fp32")
types |= dict(q_ptr="*bf16", gate_ptr="*bf16", out_ptr="*bf16")
signature = {{}}
for argument in kernel.arg_names:
    kind = "*i32" if argument.endswith("_ptr") else "i32"
    if argument == "kv_desc":
        kind = f"tensordesc<bf16[16, 64],{{NVMMASharedLayout(128, 16, 2)!r}}>"
    signature[argument] = "constexpr" if argument in constants else types.get(argument, kind)
places = {{(kernel.arg_names.index(name),): value for name, value in constants.items()}}
source = GluonASTSource(kernel, signature, places, {{}})
made = compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4, launch_pdl=True))
assert "wgmma" in made.asm["ptx"] and "cp.async.bulk.tensor" in made.asm["ptx"]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("segments", "block_n=128, stages=3, least=512, most=1 << 30, max_spans=256"),
        ("decode", "wide=8, stages=12, least=128, most=2048, max_rows=256, merge_splits=8"),
    ],
)
def test_they_compile(name: str, more: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    code = COMPILE.format(name=name, more=more)
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
