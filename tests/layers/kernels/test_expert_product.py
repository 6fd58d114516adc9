"""The experts' products in one launch against one expert after another."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from denim.layers.kernels.expert_product import expert_inner, expert_outer, sort_choices

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "width", "inner"),
    [(1, 8, 2, 32, 16), (5, 3, 3, 70, 20), (130, 4, 2, 40, 33), (7, 60, 1, 64, 70)],
)
def test_equals_one_by_one(
    tokens: int, experts: int, top_k: int, width: int, inner: int, gated: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(tokens, width + 3, device=DEVICE)[:, :width]
    up = torch.randn(experts, inner * (2 if gated else 1), width, device=DEVICE) * width**-0.5
    down = torch.randn(experts, width, inner, device=DEVICE) * inner**-0.5
    weights = torch.rand(tokens, top_k, device=DEVICE)
    # The last expert is chosen by nobody, the first by many.
    ranks = torch.rand(tokens, experts, device=DEVICE)
    ranks[:, 0] += 0.5
    ranks[:, -1] -= 1 if top_k < experts else 0
    chosen = ranks.topk(top_k).indices

    expected = torch.zeros(tokens, width, dtype=torch.float64, device=DEVICE)
    for token in range(tokens):
        for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
            y = up[expert].double() @ x[token].double()
            if gated:
                gate, y = y.chunk(2)
                y = F.silu(gate) * y
            expected[token] += weight * (down[expert].double() @ y)
    choices = sort_choices(chosen, experts)
    out = expert_outer(expert_inner(x, up, choices, gated=gated), down, choices, weights)
    assert (out.double() - expected).abs().max() < 3e-6 * expected.abs().max()
