"""Jamba's own: both forms in which experts lie in files, and configs that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from denim.errors import ConfigError
from denim.models.weights import load_model
from denim.spec.ffn import MoEFFN
from denim.spec.reader import read_spec
from tests.families.jamba import save


def test_experts_one_by_one_and_all_in_one(tmp_path: Path) -> None:
    save(tmp_path)
    file = tmp_path / "model.safetensors"
    published = load_file(file)
    assert "model.layers.1.feed_forward.experts.0.gate_proj.weight" in published
    expected = load_model(read_spec(tmp_path), tmp_path, device="cpu", chunk_size=64).blocks[1].ffn

    fused = {name: tensor for name, tensor in published.items() if ".experts." not in name}
    for i in (1, 3):
        prefix = f"model.layers.{i}.feed_forward.experts."

        def stack(name: str, prefix: str = prefix) -> torch.Tensor:
            return torch.stack([published[f"{prefix}{e}.{name}.weight"] for e in range(5)])

        fused[f"{prefix}gate_up_proj"] = torch.cat((stack("gate_proj"), stack("up_proj")), 1)
        fused[f"{prefix}down_proj"] = stack("down_proj")
    save_file(fused, file)
    ffn = load_model(read_spec(tmp_path), tmp_path, device="cpu", chunk_size=64).blocks[1].ffn
    assert torch.equal(ffn.up, expected.up)
    assert torch.equal(ffn.down, expected.down)


def test_a_config_without_a_pattern(tmp_path: Path) -> None:
    """Which layers attend and which have experts are then transformers' own."""
    from transformers import JambaConfig

    save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    absent = {key: None for key in config if key.startswith(("attn_layer", "expert_layer"))}
    assert len(absent) == 4
    spec = read_spec(config | absent | {"num_hidden_layers": 18})
    theirs = JambaConfig(num_hidden_layers=18)
    attends = [layer.mixer.letter == "F" for layer in spec.layers]
    assert attends == [kind in ("attention", "full_attention") for kind in theirs.layers_block_type]
    assert [isinstance(layer.ffn, MoEFFN) for layer in spec.layers] == [
        n > 1 for n in theirs.layers_num_experts
    ]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_layer_offset", 3),
        ("hidden_act", "gelu"),
        ("num_experts_per_tok", 6),
        ("num_key_value_heads", 4),
        ("sliding_window", 4096),
        ("mamba_dt_rank", "half"),
    ],
)
def test_refused(tmp_path: Path, key: str, value: object) -> None:
    save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(
        ConfigError, match=rf"'?{key if key != 'num_key_value_heads' else 'num_attention_heads'}'?"
    ):
        read_spec(config | {key: value})
