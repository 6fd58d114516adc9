"""What FlashInfer is told of a step: a stand-in attends over exactly the pages that were planned."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from denim.layers.attention import attend
from denim.layers.flashinfer_attention import FlashInferAttention
from denim.layers.paged_attention import AttentionShape, StepLimits
from denim.layers.triton_attention import TritonAttention
from tests.batches import rows_of_pages
from tests.layers.test_attention import DIM, HEADS, KV_HEADS, PAGE, filled, softmax_attention

SHAPE = AttentionShape(HEADS, KV_HEADS, DIM)
LENGTHS, NEWS = [1, 3, 4, 5, 17, 32], [1, 1, 1, 2, 9, 32]


class Wrapper:
    """Plans and runs as FlashInfer's wrappers do, a span after the other."""

    decodes = False

    def __init__(self, workspace: Tensor, layout: str, **given: object) -> None:
        assert layout == "NHD"
        self.given = given

    def plan(self, *args: object, causal: bool = False, sm_scale: float, **dtypes: object) -> None:
        assert sm_scale == 1.0 and causal != self.decodes
        args = list(args)
        if self.decodes:
            args.insert(0, torch.arange(len(args[0]), dtype=torch.int32))
        queries, offsets, ids, last, *heads = args
        assert heads == [HEADS, KV_HEADS, DIM, PAGE] and queries[0] == offsets[0] == 0
        assert all(t.dtype == torch.int32 and t.is_contiguous() for t in (queries, offsets, ids, last))
        assert len(ids) == offsets[-1]
        self.planned = queries.tolist(), offsets.tolist(), ids, last.tolist()

    def run(self, q: Tensor, kv: Tensor, *, q_scale: float, out: Tensor) -> Tensor:
        queries, offsets, ids, last = self.planned
        for row, final in enumerate(last):
            here = slice(queries[row], queries[row + 1])
            pages = kv[ids[offsets[row] : offsets[row + 1]].long()].transpose(1, 2).flatten(0, 1)
            length = max(len(pages) - PAGE + final, 0)
            if length:
                out[here] = softmax_attention(q[here] * q_scale * DIM**0.5, pages[:length])
        return out


class Decode(Wrapper):
    decodes = True


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> FlashInferAttention:
    module = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = Decode
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    device = torch.device("cpu")
    others = TritonAttention([SHAPE], StepLimits(8, 64, 100), PAGE, device)
    return FlashInferAttention([SHAPE], PAGE, torch.float32, torch.float32, device, others)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="CPU tensors, for which the gate's kernel is interpreted"
)
@pytest.mark.parametrize("decode", [0, 3])
def test_decode_rows_and_segments(attention: FlashInferAttention, decode: int) -> None:
    kv, tables, _ = filled(LENGTHS)
    q, gate = torch.randn(2, sum(NEWS), HEADS, DIM)
    batch = rows_of_pages(tables, LENGTHS, NEWS, page_size=PAGE, decode=decode)
    expected = attend(q, kv, batch, 0.3, gate)
    attention.plan(batch)
    torch.testing.assert_close(attention.run(q, kv, batch, 0.3, gate), expected, atol=1e-5, rtol=1e-5)


def test_captured_rows_are_padded(attention: FlashInferAttention) -> None:
    kv, tables, _ = filled(LENGTHS[:3])
    captured = attention.captured(3, StepLimits(3, 3, 50))
    given = captured.decode[SHAPE].given
    assert given["use_cuda_graph"] and not captured.segments
    sizes = {"indptr": 4, "indices": 50, "last_page_len": 3}
    assert all(len(given[f"paged_kv_{name}_buffer"]) == size for name, size in sizes.items())
    batch = rows_of_pages(tables, LENGTHS[:3], [1] * 3, page_size=PAGE, decode=3)
    q = torch.randn(3, HEADS, DIM)
    expected = attend(q, kv, batch)
    batch.kv_lengths = [*batch.kv_lengths[:2], 0]
    batch.page_offsets = [*batch.page_offsets[:3], batch.page_offsets[2]]
    captured.plan(batch)
    got = captured.run(q, kv, batch, DIM**-0.5)
    torch.testing.assert_close(got[:2], expected[:2], atol=1e-5, rtol=1e-5)
