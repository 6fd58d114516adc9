"""The kernels for Hopper where there is none: what they are told of pages, and that they compile.

What they compute is tested on a device, in tests/gpu/test_paged_attention_cuda.py.
"""

from __future__ import annotations

import pytest
import torch
from triton.experimental.gluon.language import NVMMASharedLayout

from denim.layers.kernels.hopper_pages import page_rows, suits
from tests.hopper_compiler import check_compiles

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("segments", {"block_n": 128, "stages": 3, "least": 512, "most": 1 << 30, "max_spans": 256}),
        ("decode", {"wide": 8, "stages": 12, "least": 128, "most": 2048, "max_rows": 256, "merge_splits": 8}),
    ],
)
def test_they_compile(name: str, more: dict[str, int]) -> None:
    constants = {"kv_heads": 2, "group": 3, "dim": 64, "page_size": 16, "gated": True, **more}
    types = {"_ptr": "*i32", "": "i32", "scale": "fp32", "partial_ptr": "*fp32", "stats_ptr": "*fp32"}
    types |= dict.fromkeys(("q_ptr", "gate_ptr", "out_ptr"), "*bf16")
    types["kv_desc"] = f"tensordesc<bf16[16, 64],{NVMMASharedLayout(128, 16, 2)!r}>"
    kernel, needs = (f"layers.kernels.hopper_{name}", f"_{name}"), ["wgmma", "cp.async.bulk.tensor"]
    check_compiles(*kernel, constants, types, needs, num_warps=4, launch_pdl=True)
