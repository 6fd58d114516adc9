"""Mamba2, Mamba1, lightning and short convolution layers in kernels against their plain form; on the CPU
interpreted."""

from __future__ import annotations

from math import inf

import pytest
import torch
from torch import Tensor, nn

from denim.layers.lightning import LightningLayer
from denim.layers.mamba1 import Mamba1Layer
from denim.layers.mamba2 import GateNorm, Mamba2Layer
from denim.layers.short_conv_layer import ShortConvLayer
from denim.recurrence import backend
from denim.spec.linear import Lightning, Mamba1, Mamba2, ShortConv
from denim.spec.mixers import Mixer
from tests.batches import batch_of, span_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS, HIDDEN = 9, 32
BUILT = {"dtype": torch.float32, "device": DEVICE}


def mamba2(norm: GateNorm | None, limit: tuple[float, float] = (0.0, inf), **spec: bool) -> Mamba2Layer:
    mixer = Mamba2(4, 12, 16, num_groups=2, conv_width=4, **spec)
    return Mamba2Layer(mixer, HIDDEN, 0, gate_norm=norm, chunk_size=16, time_step_limit=limit, **BUILT)


def mamba1(eps: float | None, **spec: bool) -> Mamba1Layer:
    mixer = Mamba1(inner=40, state_dim=6, dt_rank=4, conv_width=4, **spec)
    return Mamba1Layer(mixer, HIDDEN, 0, inner_norm_eps=eps, chunk_size=16, **BUILT)


LAYERS = {
    "mamba2": lambda: mamba2(GateNorm(1e-5), limit=(0.1, 2.0)),
    "mamba2, groups": lambda: mamba2(GateNorm(1e-5, 2), conv_bias=False, proj_bias=True),
    "mamba2, norm first": lambda: mamba2(GateNorm(1e-5, 2, before_gate=True)),
    "mamba2, no norm": lambda: mamba2(None),
    "mamba1": lambda: mamba1(None),
    "mamba1, norms": lambda: mamba1(1e-5, inner_norms=True, conv_bias=False),
    "mamba1, plain norms": lambda: mamba1(1e-5, proj_bias=True),
    "lightning": lambda: LightningLayer(Lightning(3, 12), HIDDEN, 0, num_layers=4, chunk_size=16, **BUILT),
    "convolution": lambda: ShortConvLayer(ShortConv(24, 3, bias=True), HIDDEN, 0, **BUILT),
}


class Slots:
    """Memory of one layer, poisoned before use."""

    def __init__(self, spec: Mixer) -> None:
        self.tensors = {
            tensor.role: torch.full((SLOTS, *tensor.shape), torch.nan, device=DEVICE)
            for tensor in spec.state_tensors("float32", "float32")
        }

    def kv(self, layer: int) -> Tensor:
        raise AssertionError("there is none")

    def state(self, layer: int, role: str) -> Tensor:
        return self.tensors[role]


def randomised(layer: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    for module in layer.modules():
        if hasattr(module, "prepare"):
            module.prepare()
    return layer


@pytest.mark.parametrize("name", LAYERS)
def test_kernels_equal_the_plain_form(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh spans, decode rows, and spans that begin from a state, their own or another's; three steps."""
    layer = randomised(LAYERS[name]())
    plain, kernels = Slots(layer.spec), Slots(layer.spec)
    steps = [
        [span_of(0, 20, -1, 1), span_of(0, 2, -1, 2), span_of(0, 33, -1, 3)],
        [span_of(20, 21, 1, 1), span_of(2, 3, 2, 2), span_of(0, 17, -1, 7), span_of(33, 40, 3, 4)],
        [span_of(17, 18, 7, 7), span_of(21, 22, 1, 1)],
    ]
    for step, spans in enumerate(steps):
        tokens = sum(len(span.tokens) for span in spans)
        x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        found = []
        for memory, form in ((plain, backend.TORCH), (kernels, backend.TRITON)):
            monkeypatch.setattr(f"{type(layer).__module__}.rule_backend", lambda *_, form=form: form)
            found.append(layer(x, batch_of(spans, memory, device=DEVICE)))
        torch.testing.assert_close(found[1], found[0], atol=2e-5, rtol=2e-5)
    for role, tensor in plain.tensors.items():
        torch.testing.assert_close(kernels.tensors[role], tensor, atol=2e-5, rtol=2e-5, equal_nan=True)
