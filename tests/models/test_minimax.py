"""Every form in which MiniMax weights lie on disk loads to the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from denim.models.weights import load_model
from denim.spec.reader import read_spec
from tests.families.minimax import save


def test_transformers_own_module_names(tmp_path: Path) -> None:
    """`mlp` with fused experts, as in a state dict of transformers 5, and the published names."""
    oracle = save(tmp_path)
    spec = read_spec(tmp_path)
    published = load_model(spec, tmp_path, device="cpu", chunk_size=64)
    names = load_file(tmp_path / "model.safetensors")
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in names
    assert "model.layers.0.self_attn.slope_rate" in names

    state = {name: tensor.contiguous() for name, tensor in oracle.state_dict().items()}
    assert "model.layers.0.mlp.experts.gate_up_proj" in state
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    fused = load_model(spec, tmp_path, device="cpu", chunk_size=64)

    expected, found = published.targets(), fused.targets()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_lost_expert_is_named(tmp_path: Path) -> None:
    save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"experts\.3\.w2"):
        load_model(read_spec(tmp_path), tmp_path, device="cpu", chunk_size=64)
