"""OLMo-hybrid: all three forms of a checkpoint hold the same model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from denim.models.weights import load_model
from denim.spec.reader import read_spec
from tests.families.olmo_hybrid import save
from tests.tiny import VOCAB, Bench, full_logits

ATTENTION = "model.layers.3."
KEYS, VALUES = 32, 72  # channels of q and of k, of v


def joined(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' own names: one convolution, norms by their place."""
    out = {}
    for name, tensor in tensors.items():
        if "k_conv1d" in name or "v_conv1d" in name:
            continue
        if "q_conv1d" in name:
            parts = [tensors[name.replace("q_conv1d", f"{x}_conv1d")] for x in "qkv"]
            name, tensor = name.replace("q_conv1d", "conv1d"), torch.cat(parts)
        name = name.replace("attention_layer_norm", "input_layernorm")
        out[name.replace("feedforward_layer_norm", "post_attention_layernorm")] = tensor
    return out


def published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The vendor's names: a convolution each for q, k and v, two names for a block's second norm."""
    out = {}
    for name, tensor in joined(tensors).items():
        if "conv1d" in name:
            for x, part in zip("qkv", tensor.split((KEYS, KEYS, VALUES)), strict=True):
                out[name.replace("conv1d", f"{x}_conv1d")] = part.clone()
            continue
        if not name.startswith(ATTENTION):
            name = name.replace("input_layernorm", "attention_layer_norm")
            name = name.replace("post_attention_layernorm", "feedforward_layer_norm")
        out[name] = tensor
    return out


@pytest.mark.parametrize("form", [joined, published])
def test_other_forms(tmp_path: Path, form: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    model = save(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    renamed = form(tensors)
    assert renamed.keys() != tensors.keys() or any(renamed[n].shape != t.shape for n, t in tensors.items())
    save_file(renamed, file, metadata={"format": "pt"})
    spec = read_spec(tmp_path)
    bench = Bench(load_model(spec, tmp_path, device="cpu", chunk_size=64), spec)
    tokens = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = full_logits(model, tokens)
    assert (bench.run(tokens, 0, 40, -1, 0) - expected).abs().max() < 3e-4 * expected.std()
