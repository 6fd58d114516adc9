"""Whole attention layers with the Triton kernels against the same layers in plain torch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from denim.layers.attention import Attention
from denim.layers.batch import StepBatch
from denim.layers.kernels.split_keys import Cut
from denim.layers.latent_attention import LatentAttentionLayer
from denim.layers.norm import RMSNorm
from denim.layers.paged_attention import AttentionShape, StepLimits
from denim.layers.rotary import Rotary
from denim.layers.triton_attention import TritonAttention, decode_cut
from denim.spec.attention import FullAttention, LatentAttention
from denim.spec.model import Rope
from tests.batches import rows_of_pages

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN, PAGE = 12, 4
LENGTHS, NEWS, DECODE = [1, 9, 140, 5, 21], [1, 1, 1, 5, 6], 3
PLACE = {"norm_eps": 1e-6, "dtype": torch.float32, "device": DEVICE}


def filled(layer: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    for module in layer.modules():
        if isinstance(module, RMSNorm):
            module.prepare()
    return layer


def step(page_shape: tuple[int, ...], rotary_dim: int, kv_dtype: torch.dtype) -> tuple[StepBatch, Tensor]:
    """A batch of three decode rows and two segments, and pages that hold what lies before them."""
    generator = torch.Generator().manual_seed(1)
    counts = [-(-length // PAGE) for length in LENGTHS]
    order = torch.randperm(sum(counts) + 3, generator=generator)
    tables = list(order[: sum(counts)].split(counts))
    pages = torch.full((len(order), *page_shape), float("nan"))
    in_page = pages.movedim(-3 if len(page_shape) == 4 else -2, 1)  # [pages, page_size, ...]
    for table, length, new in zip(tables, LENGTHS, NEWS, strict=True):
        at = torch.arange(length - new)
        shape = (length - new, *in_page.shape[2:])
        in_page[table[at // PAGE], at % PAGE] = torch.randn(shape, generator=generator)
    pages = pages.to(kv_dtype).to(DEVICE)
    batch = rows_of_pages(tables, LENGTHS, NEWS, page_size=PAGE, decode=DECODE, device=DEVICE)
    batch.memory = SimpleNamespace(kv=lambda layer: pages)
    if rotary_dim:
        batch.cos, batch.sin = Rotary(Rope(1e4), rotary_dim, DEVICE).angles(batch.positions, torch.float32)
    return batch, pages


def check(layer: nn.Module, page_shape: tuple[int, ...], rotary_dim: int, shape: AttentionShape) -> None:
    x = torch.randn(sum(NEWS), HIDDEN, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    batch, plain_pages = step(page_shape, rotary_dim, torch.float32)
    expected = layer(x, batch)
    batch, pages = step(page_shape, rotary_dim, torch.float32)
    batch.attention = TritonAttention([shape], StepLimits(8, 64, 100), PAGE, torch.device(DEVICE))
    batch.attention.plan(batch)
    torch.testing.assert_close(layer(x, batch), expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(pages, plain_pages, atol=2e-6, rtol=2e-6, equal_nan=True)


@pytest.mark.parametrize(
    "given",
    [
        {"gated": True, "qk_norm": True, "rotary_dim": 4},
        {"qk_norm": True, "qk_norm_whole": True, "rotary_dim": 8},
        {"rotary_dim": 0},
    ],
    ids=["gated", "whole norm", "no positions"],
)
def test_attention(given: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    few_units(monkeypatch)
    spec = FullAttention(num_heads=4, num_kv_heads=2, head_dim=8, **given)
    layer = filled(Attention(spec, HIDDEN, 0, **PLACE))
    check(layer, spec.page_shape(PAGE), spec.rotary_dim, AttentionShape(4, 2, 8))


@pytest.mark.parametrize("turned", [False, True])
def test_latents(turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    few_units(monkeypatch)
    spec = LatentAttention(num_heads=3, latent_dim=24, nope_dim=5, rope_dim=4, value_dim=6, gated=True)
    layer = filled(LatentAttentionLayer(spec, HIDDEN, 0, turned=turned, **PLACE))
    check(layer, spec.page_shape(PAGE), 4 if turned else 0, AttentionShape(3, 1, 24, 4))


def few_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after the other, empty ones too."""
    if DEVICE == "cpu":
        monkeypatch.setattr("denim.layers.triton_attention.SEGMENTS", Cut(4, 128, 1 << 30))


def test_many_are_cut_less_finely_than_one() -> None:
    waves = [decode_cut(rows, hopper=hopper).wave for hopper in (False, True) for rows in (1, 16, 512)]
    assert waves[0] > waves[1] > waves[2] == 1 and waves[3] > waves[4] > waves[5] == 1
