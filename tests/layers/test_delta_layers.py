"""Prefill of the delta rule's layers in kernels against their plain form; on the CPU interpreted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from denim.layers.gated_delta_net import GatedDeltaNetLayer
from denim.layers.kimi_delta import KimiDeltaLayer
from denim.recurrence import backend
from denim.spec.linear import GatedDeltaNet, KimiDelta
from tests.batches import batch_of, span_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS, HIDDEN = 9, 32

GATED = {
    "num_key_heads": 2,
    "num_value_heads": 4,
    "key_dim": 16,
    "value_dim": 12,
    "conv_width": 4,
}
KIMI = {"num_heads": 2, "key_dim": 16, "value_dim": 12, "conv_width": 4}
MIXERS = {
    "gated": GatedDeltaNet(**GATED),
    "gated, beta up to 2": GatedDeltaNet(**GATED, beta_limit=2.0),
    "kimi": KimiDelta(**KIMI, decay_rank=8, gate_rank=8),
    "kimi with a floor": KimiDelta(**KIMI, decay_rank=0, gate_rank=0, decay_floor=-5.0),
}


class Slots:
    """Memory of one layer, poisoned before use."""

    def __init__(self, spec: GatedDeltaNet | KimiDelta) -> None:
        self.tensors = {
            tensor.role: torch.full((SLOTS, *tensor.shape), torch.nan, device=DEVICE)
            for tensor in spec.state_tensors("float32", "float32")
        }

    def kv(self, layer: int) -> Tensor:
        raise AssertionError("there is none")

    def state(self, layer: int, role: str) -> Tensor:
        return self.tensors[role]


@pytest.mark.parametrize("name", MIXERS)
def test_prefill_in_kernels_equals_the_plain_form(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh spans and spans that begin from a state, their own or another's; two steps."""
    spec = MIXERS[name]
    layer_of = GatedDeltaNetLayer if isinstance(spec, GatedDeltaNet) else KimiDeltaLayer
    layer = layer_of(spec, HIDDEN, 0, norm_eps=1e-6, chunk_size=16, dtype=torch.float32, device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    layer.prepare()
    layer.norm.prepare()

    plain, kernels = Slots(spec), Slots(spec)
    first = [span_of(0, 20, -1, 1), span_of(0, 2, -1, 2), span_of(0, 33, -1, 3)]
    second = [span_of(20, 60, 1, 1), span_of(2, 3, 2, 5), span_of(0, 17, -1, 7), span_of(33, 40, 3, 3)]
    for step, spans in enumerate((first, second)):
        tokens = sum(len(span.tokens) for span in spans)
        x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        found = []
        for memory, form in ((plain, backend.TORCH), (kernels, backend.TRITON)):
            module = type(layer).__module__
            monkeypatch.setattr(f"{module}.rule_backend", lambda *_, form=form: form)
            found.append(layer(x, batch_of(spans, memory, device=DEVICE)))
        torch.testing.assert_close(found[1], found[0], atol=2e-5, rtol=2e-5)
    for role, tensor in plain.tensors.items():
        torch.testing.assert_close(kernels.tensors[role], tensor, atol=2e-5, rtol=2e-5, equal_nan=True)
