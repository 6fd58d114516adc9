"""Attention over pages: every way to run it against a plain softmax, with NaN where nothing was written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from denim.layers.attention import _decode_rows, attend, narrowed
from tests.batches import rows_of_pages

HEADS, KV_HEADS, DIM = 6, 2, 8
PAGE = 4
LENGTHS = [1, 3, 4, 5, 17, 32]


def empty(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int64)


def filled(lengths: list[int]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Pages [64, 2, PAGE, KV_HEADS, DIM] of rows in shuffled order, their tables, and each row's KV."""
    generator = torch.Generator().manual_seed(0)
    kv = torch.full((64, 2, PAGE, KV_HEADS, DIM), float("nan"))
    order = torch.randperm(64, generator=generator)
    tables, rows, used = [], [], 0
    for length in lengths:
        pages = -(-length // PAGE)
        table = order[used : used + pages]
        used += pages
        content = torch.randn(length, 2, KV_HEADS, DIM, generator=generator)
        for place in range(length):
            kv[table[place // PAGE], :, place % PAGE] = content[place]
        tables.append(table)
        rows.append(content)
    return kv, tables, rows


def softmax_attention(q: Tensor, content: Tensor) -> Tensor:
    """q [n, HEADS, DIM] are the last n positions of a row's KV."""
    n, length = len(q), len(content)
    k, v = (content[:, side].repeat_interleave(HEADS // KV_HEADS, 1) for side in (0, 1))
    scores = torch.einsum("nhd,lhd->hnl", q, k) * DIM**-0.5
    hidden = torch.ones(n, length, dtype=torch.bool).triu(length - n + 1)
    return torch.einsum("hnl,lhd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def test_decode_rows_one_by_one_and_padded_together() -> None:
    kv, tables, rows = filled(LENGTHS)
    q = torch.randn(len(LENGTHS), HEADS, DIM)
    batch = rows_of_pages(tables, LENGTHS, [1] * len(LENGTHS), page_size=PAGE, decode=len(LENGTHS))
    expected = torch.cat([softmax_attention(q[i : i + 1], row) for i, row in enumerate(rows)])
    torch.testing.assert_close(attend(q, kv, batch), expected)
    torch.testing.assert_close(_decode_rows(q, kv, batch), expected)


@pytest.mark.parametrize("news", [[1, 1, 2, 5, 9, 32], [1, 3, 4, 1, 17, 1]])
def test_segments_behind_a_past(news: list[int]) -> None:
    kv, tables, rows = filled(LENGTHS)
    q = torch.randn(sum(news), HEADS, DIM)
    batch = rows_of_pages(tables, LENGTHS, news, page_size=PAGE, decode=0)
    expected = torch.cat(
        [softmax_attention(part, row) for part, row in zip(q.split(news), rows, strict=True)]
    )
    torch.testing.assert_close(attend(q, kv, batch), expected)


def test_what_is_too_large_for_8_bits_is_the_largest_number() -> None:
    x = torch.tensor([1e4, -1e4, 3.0])
    assert narrowed(x, torch.float8_e4m3fn).float().tolist() == [448.0, -448.0, 3.0]
