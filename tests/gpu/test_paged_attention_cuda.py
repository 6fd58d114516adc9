"""Paged attention on a CUDA device at the sizes of real models, against float64."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from denim.layers.batch import StepBatch
from denim.layers.paged_attention import (
    FLASHINFER,
    TRITON,
    AttentionShape,
    PagedAttention,
    StepLimits,
    paged_attention,
)
from tests.batches import rows_of_pages

pytestmark = pytest.mark.gpu

PAGE, PAGES = 16, 2000
LENGTHS = [1, 16, 17, 300, 5000, 40, 700, 1024, 2500]
NEWS = [1, 1, 1, 1, 1, 40, 300, 1024, 10]
DECODE = 5
PORTABLE = "portable"  # Triton without the kernels for Hopper
BACKENDS = [
    TRITON,
    PORTABLE,
    pytest.param(
        FLASHINFER, marks=pytest.mark.skipif(find_spec("flashinfer") is None, reason="no FlashInfer")
    ),
]
WIDE = AttentionShape(8, 2, 256)


def pages_of(shape: AttentionShape, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """KV [PAGES, 2, PAGE, kv_heads, dim], NaN where no row has written, and the rows' tables."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(PAGES, generator=generator)
    tables: list[Tensor] = []
    at = 0
    kv = torch.full((PAGES, 2, PAGE, shape.num_kv_heads, shape.dim), float("nan"))
    for length in LENGTHS:
        table = order[at : at + -(-length // PAGE)]
        at += len(table)
        tables.append(table)
        place = torch.arange(length)
        content = torch.randn(length, 2, shape.num_kv_heads, shape.dim, generator=generator)
        kv[table[place // PAGE], :, place % PAGE] = content
    return kv.to(dtype).cuda(), tables


def exact(q: Tensor, kv: Tensor, tables: list[Tensor], scale: float) -> Tensor:
    parts = []
    for part, table, length in zip(q.double().split(NEWS), tables, LENGTHS, strict=True):
        content = kv[table.cuda()].double().transpose(1, 2).flatten(0, 1)[:length]
        k, v = (
            content[:, side].repeat_interleave(q.shape[1] // kv.shape[3], 1).transpose(0, 1)
            for side in (0, 1)
        )
        scores = part.transpose(0, 1) @ k.mT * scale
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(length - len(part) + 1)
        parts.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(parts)


def made(backend: str, shape: AttentionShape, dtype: torch.dtype, kv_dtype: torch.dtype) -> PagedAttention:
    limits = StepLimits(16, 4096, PAGES)
    device = torch.device("cuda")
    attention = paged_attention(
        TRITON if backend == PORTABLE else backend,
        [shape],
        limits,
        page_size=PAGE,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
    )
    assert attention is not None
    if backend == PORTABLE:
        attention.hopper = False
    return attention


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
def test_bf16(backend: str, kv_dtype: torch.dtype) -> None:
    kv, tables = pages_of(WIDE, kv_dtype)
    both = torch.randn(sum(NEWS), 8, 512, device="cuda", dtype=torch.bfloat16)
    q, gate = both[..., :256], both[..., 256:]
    batch = rows_of_pages(tables, LENGTHS, NEWS, page_size=PAGE, decode=DECODE, device="cuda")
    attention = made(backend, WIDE, torch.bfloat16, kv_dtype)
    attention.plan(batch)
    got = attention.run(q, kv, batch, 0.07, gate)
    expected = exact(q, kv, tables, 0.07) * gate.double().sigmoid()
    torch.testing.assert_close(got.double(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(AttentionShape(32, 2, 128), torch.bfloat16), (AttentionShape(6, 2, 64), torch.float16)],
    ids=str,
)
def test_other_heads(shape: AttentionShape, dtype: torch.dtype) -> None:
    kv, tables = pages_of(shape, dtype)
    q = torch.randn(sum(NEWS), shape.num_heads, shape.dim, device="cuda", dtype=dtype)
    batch = rows_of_pages(tables, LENGTHS, NEWS, page_size=PAGE, decode=DECODE, device="cuda")
    got = made(TRITON, shape, dtype, dtype).run(q, kv, batch, 0.07)
    torch.testing.assert_close(got.double(), exact(q, kv, tables, 0.07), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("shape", [WIDE, AttentionShape(6, 2, 96), AttentionShape(4, 1, 64)], ids=str)
def test_fp32_is_exact(shape: AttentionShape) -> None:
    kv, tables = pages_of(shape, torch.float32)
    q = torch.randn(sum(NEWS), shape.num_heads, shape.dim, device="cuda")
    batch = rows_of_pages(tables, LENGTHS, NEWS, page_size=PAGE, decode=DECODE, device="cuda")
    got = made(TRITON, shape, torch.float32, torch.float32).run(q, kv, batch, 0.07)
    torch.testing.assert_close(got.double(), exact(q, kv, tables, 0.07), atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_captured_graph_follows_the_lengths(backend: str) -> None:
    """Captured with padding alone, replayed with rows that grow."""
    kv, tables = pages_of(WIDE, torch.bfloat16)
    q = torch.randn(4, 8, 256, device="cuda", dtype=torch.bfloat16)
    attention = made(backend, WIDE, torch.bfloat16, torch.bfloat16).captured(4, StepLimits(4, 4, PAGES))
    static = rows_of_pages(tables[:4], [1] * 4, [1] * 4, page_size=PAGE, decode=4, device="cuda")
    static.page_ids = torch.zeros(PAGES, dtype=torch.int32, device="cuda")

    def fill(batch: StepBatch, lengths: list[int]) -> None:
        static.page_ids[: len(batch.page_ids)] = batch.page_ids
        static.page_indptr.copy_(batch.page_indptr)
        static.kv_lens.copy_(torch.tensor(lengths))
        static.kv_lengths, static.page_offsets = lengths, batch.page_offsets
        attention.plan(static)

    fill(static, [0] * 4)
    static.page_offsets = [0] * 5
    attention.plan(static)
    attention.run(q, kv, static, 0.07)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attention.run(q, kv, static, 0.07)
    for rows in ([0, 1, 2, 3], [4, 3, 5, 6], [8, 7, 6, 4]):
        lengths = [LENGTHS[row] for row in rows]
        batch = rows_of_pages(
            [tables[row] for row in rows], lengths, [1] * 4, page_size=PAGE, decode=4, device="cuda"
        )
        fill(batch, lengths)
        graph.replay()
        for place, row in enumerate(rows):
            content = kv[tables[row].cuda()].double().transpose(1, 2).flatten(0, 1)[: LENGTHS[row]]
            k, v = (content[:, side].repeat_interleave(4, 1) for side in (0, 1))
            weights = (torch.einsum("hd,lhd->hl", q[place].double(), k) * 0.07).softmax(-1)
            expected = torch.einsum("hl,lhd->hd", weights, v)
            torch.testing.assert_close(got[place].double(), expected, atol=2e-2, rtol=2e-2)
