"""Who attends: the choice by what is there, and refusals that say what is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from denim.errors import ConfigError
from denim.layers import paged_attention as module
from denim.layers.paged_attention import AttentionShape, attention_backend, attention_shapes, paged_attention
from denim.layers.paged_attention import StepLimits as Limits
from denim.spec import embedded_model
from denim.spec.attention import FullAttention, LatentAttention
from denim.spec.linear import Mamba2
from denim.spec.model import Layer
from denim.spec.parallel import Parallel
from denim.spec.reader import read_spec

WIDE, ODD, LATENT = AttentionShape(8, 2, 256), AttentionShape(8, 2, 96), AttentionShape(32, 1, 512, 64)
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def missing(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Libraries that are not installed: none, if a test does not add some."""
    names: set[str] = set()
    monkeypatch.setattr(module, "installed", lambda name: name not in names)
    return names


def chosen(wanted: str, *shapes: AttentionShape, dtype: torch.dtype = BF16, device: str = "cuda") -> str:
    return attention_backend(wanted, shapes, dtype=dtype, device_type=device)


def test_auto_takes_what_is_there(missing: set[str]) -> None:
    assert chosen("auto", WIDE, device="cpu") == "torch"
    assert chosen("auto", WIDE) == chosen("auto", WIDE, dtype=FP32) == chosen("auto", ODD) == "triton"
    missing.add("flashinfer")
    assert chosen("auto", WIDE) == "triton"
    missing.add("triton")
    assert chosen("auto", WIDE) == "torch"


def test_forced() -> None:
    for wanted in ("torch", "triton", "flashinfer"):
        assert chosen(wanted, WIDE, LATENT) == wanted


@pytest.mark.parametrize(
    ("wanted", "shape", "given", "reason"),
    [
        ("triton", WIDE, {"device": "cpu"}, "needs a CUDA device"),
        ("flashinfer", WIDE, {"dtype": FP32}, "not in torch.float32"),
        ("flashinfer", ODD, {}, "no kernels for heads of 96"),
    ],
)
def test_refused(wanted: str, shape: AttentionShape, given: dict, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        chosen(wanted, shape, **given)


@pytest.mark.parametrize(
    ("wanted", "reason"), [("triton", "needs Triton"), ("flashinfer", "pip install flashinfer-python")]
)
def test_refused_where_it_is_not_installed(wanted: str, reason: str, missing: set[str]) -> None:
    missing.add(wanted)
    with pytest.raises(ConfigError, match=reason):
        chosen(wanted, WIDE)


def test_shapes_of_a_model() -> None:
    spec = read_spec(embedded_model())
    shape = AttentionShape(4, 1, 64)
    assert attention_shapes(spec) == (shape,)
    full = FullAttention(4, 1, 64, rotary_dim=16)
    layers = (
        Layer(Parallel(full, Mamba2(2, 8, 4, 1, 4)), spec.layers[0].ffn),
        Layer(LatentAttention(32, 512, 128, 64, 128), spec.layers[0].ffn),
    )
    assert attention_shapes(replace(spec, layers=layers)) == (shape, LATENT)
    drafts = (Layer(FullAttention(8, 2, 96, rotary_dim=16), spec.layers[0].ffn),)
    assert attention_shapes(replace(spec, mtp_layers=drafts)) == (shape, ODD)


def test_plain_torch_is_no_object() -> None:
    place = {"page_size": 16, "dtype": BF16, "kv_dtype": BF16, "device": torch.device("cpu")}
    assert paged_attention("torch", [WIDE], Limits(1, 1, 1), **place) is None
    assert paged_attention("triton", [], Limits(1, 1, 1), **place) is None
