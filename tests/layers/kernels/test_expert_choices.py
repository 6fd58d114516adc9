"""Comparing all pairs gives the order of a stable sort."""

from __future__ import annotations

import pytest
import torch

from denim.layers.kernels import expert_choices
from denim.layers.kernels.expert_choices import sort_choices

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 2, 1), (7, 60, 3), (40, 5, 2)])
def test_compared_is_sorted(tokens: int, experts: int, top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    chosen = torch.rand(tokens, experts, device=DEVICE).topk(top_k).indices
    compared = sort_choices(chosen, experts)
    monkeypatch.setattr(expert_choices, "COMPARED_PAIRS", 0)
    by_sort = sort_choices(chosen, experts)
    assert torch.equal(compared.order, by_sort.order)
    assert torch.equal(compared.starts, by_sort.starts)
