"""Latent attention over pages: every way to run it against its definition; NaN where nothing was written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from denim.layers.latent_attention import ABSORBED_BLOCK, LatentAttentionLayer
from denim.spec.attention import LatentAttention
from tests.batches import rows_of_pages
from tests.layers.test_attention import PAGE

SPEC = LatentAttention(num_heads=3, latent_dim=7, nope_dim=5, rope_dim=2, value_dim=4)
LENGTHS = [1, 3, 4, 5, 17, 45]


@pytest.fixture
def layer() -> LatentAttentionLayer:
    made = LatentAttentionLayer(SPEC, 8, 0, turned=False, norm_eps=1e-6, dtype=torch.float32, device="cpu")
    made.up.data.normal_(generator=torch.Generator().manual_seed(1))
    return made


def filled() -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Pages [64, PAGE, latent + rope] in shuffled order, the rows' tables, and what each row stored."""
    generator = torch.Generator().manual_seed(0)
    pages = torch.full((64, PAGE, SPEC.latent_dim + SPEC.rope_dim), float("nan"))
    order = torch.randperm(64, generator=generator)
    tables, rows, used = [], [], 0
    for length in LENGTHS:
        table = order[used : used + -(-length // PAGE)]
        used += len(table)
        stored = torch.randn(length, pages.shape[-1], generator=generator)
        for place in range(length):
            pages[table[place // PAGE], place % PAGE] = stored[place]
        tables.append(table)
        rows.append(stored)
    return pages, tables, rows


def by_definition(layer: LatentAttentionLayer, q: Tensor, shared: Tensor, stored: Tensor) -> Tensor:
    """q, shared [n, heads, ...] are the last n of the positions that stored [L, latent + rope] holds."""
    n, length = len(q), len(stored)
    latent, key = stored.split((SPEC.latent_dim, SPEC.rope_dim), dim=-1)
    k, v = torch.einsum("hul,sl->shu", layer.up, latent).split((SPEC.nope_dim, SPEC.value_dim), dim=-1)
    scores = torch.einsum("nhd,shd->hns", q, k) + torch.einsum("nhd,sd->hns", shared, key)
    hidden = torch.ones(n, length, dtype=torch.bool).triu(length - n + 1)
    weights = (scores * (SPEC.nope_dim + SPEC.rope_dim) ** -0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hns,shv->nhv", weights, v)


def queries(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(n, SPEC.num_heads, SPEC.nope_dim + SPEC.rope_dim, generator=generator)
    return q.split((SPEC.nope_dim, SPEC.rope_dim), dim=-1)


def test_decode_rows_one_by_one_and_padded_together(layer: LatentAttentionLayer) -> None:
    pages, tables, rows = filled()
    q, shared = queries(len(LENGTHS))
    batch = rows_of_pages(tables, LENGTHS, [1] * len(LENGTHS), page_size=PAGE, decode=len(LENGTHS))
    each = [slice(i, i + 1) for i in range(len(rows))]
    expected = torch.cat(
        [by_definition(layer, q[i], shared[i], row) for i, row in zip(each, rows, strict=True)]
    )
    torch.testing.assert_close(layer._attend(q, shared, pages, batch), expected)
    torch.testing.assert_close(layer._decode_rows(layer._absorb(q, shared), pages, batch), expected)


@pytest.mark.parametrize("expand_from", [0, 4, float("inf")])
@pytest.mark.parametrize("news", [[1, 1, 2, 5, 9, 45], [1, 3, 4, 1, 17, 20]])
def test_segments_behind_a_past(layer: LatentAttentionLayer, news: list[int], expand_from: float) -> None:
    """Absorbed, expanded, and whichever is cheaper; more queries than one absorbed product takes."""
    assert max(news) > ABSORBED_BLOCK
    layer.expand_from = expand_from
    pages, tables, rows = filled()
    q, shared = queries(sum(news))
    batch = rows_of_pages(tables, LENGTHS, news, page_size=PAGE, decode=0)
    parts = zip(q.split(news), shared.split(news), rows, strict=True)
    expected = torch.cat([by_definition(layer, a, b, row) for a, b, row in parts])
    torch.testing.assert_close(layer._attend(q, shared, pages, batch), expected)


def test_expansion_pays_from_the_count_where_both_forms_cost_the_same(layer: LatentAttentionLayer) -> None:
    n, latent, rope = layer.expand_from, SPEC.latent_dim, SPEC.rope_dim
    absorbed = n * (2 * latent + rope)
    expanded = n * (SPEC.nope_dim + rope + SPEC.value_dim) + latent * (SPEC.nope_dim + SPEC.value_dim)
    assert absorbed == pytest.approx(expanded)
