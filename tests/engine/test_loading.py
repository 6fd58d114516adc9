"""What a loaded model is told."""

import pytest

from denim.engine.loading import load
from denim.engine.options import EngineOptions
from denim.errors import ConfigError
from denim.layers.gated_delta_net import GatedDeltaNetLayer


@pytest.mark.parametrize("wish", ["auto", "torch"])
def test_the_wish_for_a_form_reaches_every_linear_layer(wish):
    model = load(EngineOptions(device="cpu", recurrence_backend=wish)).model
    layers = [module for module in model.modules() if isinstance(module, GatedDeltaNetLayer)]
    assert layers
    assert {layer.recurrence_backend for layer in layers} == {wish}


def test_a_form_for_another_device_is_refused():
    with pytest.raises(ConfigError, match="recurrence_backend='triton' needs a CUDA device"):
        load(EngineOptions(device="cpu", recurrence_backend="triton"))


def test_an_unknown_form_is_refused():
    with pytest.raises(ConfigError, match="recurrence_backend='cuda'; supported: auto, torch, triton"):
        EngineOptions(recurrence_backend="cuda")
