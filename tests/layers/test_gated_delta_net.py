"""The Gated DeltaNet layer's prefill in kernels against its plain form; on the CPU interpreted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from denim.layers.gated_delta_net import GatedDeltaNetLayer
from denim.spec.linear import GatedDeltaNet
from tests.batches import batch_of, span_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS, HIDDEN = 9, 32


class Slots:
    """Memory of one layer, poisoned before use."""

    def __init__(self, spec: GatedDeltaNet) -> None:
        self.tensors = {
            tensor.role: torch.full((SLOTS, *tensor.shape), torch.nan, device=DEVICE)
            for tensor in spec.state_tensors("float32", "float32")
        }

    def kv(self, layer: int) -> Tensor:
        raise AssertionError("there is none")

    def state(self, layer: int, role: str) -> Tensor:
        return self.tensors[role]


def layer_of(beta_limit: float) -> GatedDeltaNetLayer:
    spec = GatedDeltaNet(
        num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=12, conv_width=4, beta_limit=beta_limit
    )
    layer = GatedDeltaNetLayer(
        spec, HIDDEN, 0, norm_eps=1e-6, chunk_size=16, dtype=torch.float32, device=DEVICE
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    layer.norm.prepare()
    return layer


@pytest.mark.parametrize("beta_limit", [1.0, 2.0])
def test_prefill_in_kernels_equals_the_plain_form(beta_limit: float) -> None:
    """Fresh spans and spans that begin from a state, their own or another's; two steps."""
    layer = layer_of(beta_limit)
    plain, kernels = Slots(layer.spec), Slots(layer.spec)
    first = [span_of(0, 20, -1, 1), span_of(0, 2, -1, 2), span_of(0, 33, -1, 3)]
    second = [span_of(20, 60, 1, 1), span_of(2, 3, 2, 5), span_of(0, 17, -1, 7), span_of(33, 40, 3, 3)]
    for step, spans in enumerate((first, second)):
        tokens = sum(len(span.tokens) for span in spans)
        x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        projected = layer.in_proj(x)
        expected = layer._prefill(projected, batch_of(spans, plain, device=DEVICE))
        found = layer._prefill_fused(projected, batch_of(spans, kernels, device=DEVICE))
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    for role, tensor in plain.tensors.items():
        torch.testing.assert_close(kernels.tensors[role], tensor, atol=2e-5, rtol=2e-5, equal_nan=True)
