"""The experts' products in one launch against one expert after another."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from denim.layers.kernels.expert_choices import sort_choices
from denim.layers.kernels.expert_product import expert_inner, expert_outer

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


@pytest.mark.parametrize("gated", [False, True])
def test_weights_in_fp8_blocks(gated: bool) -> None:
    """As the same numbers dequantised; 384 = 3 blocks, so that neighbours' scales cannot be mistaken."""
    torch.manual_seed(0)
    tokens, experts, top_k, width, inner = 9, 3, 2, 256, 384
    dtype = torch.float32
    x = torch.randn(tokens, width, device=DEVICE, dtype=dtype)

    def fp8(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        values = (torch.randn(shape, device=DEVICE) * 20).to(torch.float8_e4m3fn)
        scales = (torch.rand(*shape[:-2], shape[-2] // 128, shape[-1] // 128, device=DEVICE) + 0.5) / 300
        whole = scales.repeat_interleave(128, -1).repeat_interleave(128, -2)
        return values, scales, values.to(dtype) * whole

    up, up_scales, up_meant = fp8(experts, inner * (2 if gated else 1), width)
    down, down_scales, down_meant = fp8(experts, width, inner)
    weights = torch.rand(tokens, top_k, device=DEVICE)
    choices = sort_choices(torch.rand(tokens, experts, device=DEVICE).topk(top_k).indices, experts)
    inner_out = expert_inner(x, up, choices, gated=gated, scales=up_scales)
    expected = expert_inner(x, up_meant, choices, gated=gated)
    torch.testing.assert_close(inner_out, expected, rtol=1e-5, atol=1e-5)
    out = expert_outer(inner_out, down, choices, weights, scales=down_scales)
    torch.testing.assert_close(
        out, expert_outer(expected, down_meant, choices, weights), rtol=1e-5, atol=1e-4
    )
