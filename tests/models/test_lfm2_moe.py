"""Every form in which LFM2-MoE weights lie on disk loads to the same model."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from denim.models.weights import load_model
from denim.spec.reader import read_spec
from tests.families.lfm2_moe import save


def test_fused_experts_and_one_by_one(tmp_path: Path) -> None:
    """The published names, which `save_pretrained` writes too, and a state dict of transformers 5."""
    oracle = save(tmp_path)
    spec = read_spec(tmp_path)
    published = load_model(spec, tmp_path, device="cpu", chunk_size=64)
    assert "model.layers.2.feed_forward.experts.6.w2.weight" in load_file(tmp_path / "model.safetensors")

    state = {name: tensor.contiguous() for name, tensor in oracle.state_dict().items()}
    del state["lm_head.weight"]  # tied
    assert "model.layers.2.feed_forward.experts.gate_up_proj" in state
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    fused = load_model(spec, tmp_path, device="cpu", chunk_size=64)

    expected, found = published.targets(), fused.targets()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
