"""What a loaded model is told."""

import pytest
import torch

from denim.engine.loading import choose_device, load
from denim.engine.options import EngineOptions
from denim.errors import ConfigError
from denim.layers.gated_delta_net import GatedDeltaNetLayer


@pytest.mark.parametrize("wish", ["auto", "torch"])
def test_the_wish_for_a_form_reaches_every_linear_layer(wish):
    model = load(EngineOptions(device="cpu", recurrence_backend=wish)).model
    layers = [module for module in model.modules() if isinstance(module, GatedDeltaNetLayer)]
    assert layers
    assert {layer.recurrence_backend for layer in layers} == {wish}


def test_dtypes_that_are_asked_for():
    loaded = load(EngineOptions(device="cpu", dtype="float32", state_dtype="bfloat16"))
    assert (loaded.spec.dtype, loaded.spec.state_dtype) == ("float32", "bfloat16")
    assert loaded.model.embedding.dtype == torch.float32


def test_a_form_for_another_device_is_refused():
    with pytest.raises(ConfigError, match="recurrence_backend='triton' needs a CUDA device"):
        load(EngineOptions(device="cpu", recurrence_backend="triton"))


def test_an_unknown_form_is_refused():
    with pytest.raises(ConfigError, match="recurrence_backend='cuda'; supported: auto, torch, triton"):
        EngineOptions(recurrence_backend="cuda")


def test_a_device_that_is_not_there_is_refused():
    count = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=f"device='cuda:{count}', but torch .* sees {count} CUDA devices"):
        choose_device(f"cuda:{count}")


@pytest.mark.parametrize("name", ["", "x", "meta", "mps", "cpu:0", "cpu:7", "cuda:x"])
def test_a_device_of_another_kind_is_refused(name: str):
    with pytest.raises(ConfigError, match=f"device='{name}'; supported: 'auto', 'cpu', 'cuda', 'cuda:N'"):
        choose_device(name)
    with pytest.raises(ConfigError, match="device='mps'; supported: 'auto', 'cpu', 'cuda', 'cuda:N'"):
        choose_device("mps")
