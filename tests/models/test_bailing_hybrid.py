"""Ling-3.0: the MTP head is left out, both gates of KDA, and what is not covered is named."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from denim.errors import ConfigError
from denim.models.weights import load_model
from denim.spec.published import FOLDER as CONFIGS
from denim.spec.reader import read_spec
from tests.families.bailing_hybrid import oracle, save

FLASH = json.loads((CONFIGS / "ling_3.0_flash.json").read_text())


def load(folder: Path) -> torch.nn.Module:
    return load_model(read_spec(folder), folder, device="cpu", chunk_size=64)


def test_transformers_own_config(tmp_path: Path) -> None:
    save(tmp_path / "published")
    oracle().save_pretrained(tmp_path / "saved")
    assert read_spec(tmp_path / "published") == read_spec(tmp_path / "saved")


def test_published_names_of_output_projections(tmp_path: Path) -> None:
    """`dense` in latent attention and `o_proj` in KDA, where transformers writes `dense` for both."""
    save(tmp_path)
    before = load(tmp_path).targets()
    weights = load_file(tmp_path / "model.safetensors")
    kda = {name.split(".attention.")[0] for name in weights if name.endswith(".A_log")}
    assert len(kda) == 4
    renamed = {
        name.replace(".dense.", ".o_proj.") if name.split(".attention.")[0] in kda else name: tensor
        for name, tensor in weights.items()
    }
    assert renamed.keys() != weights.keys()
    save_file(renamed, tmp_path / "model.safetensors")
    after = load(tmp_path).targets()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_mtp_head_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is published as one layer more; without its mark a surplus layer stays an error."""
    save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    extra = {
        name.replace("layers.5.", "layers.6."): tensor.clone()
        for name, tensor in weights.items()
        if name.startswith("model.layers.5.")
    }
    save_file(weights | extra, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.layers\.6\."):
        load(tmp_path)
    head = {f"model.layers.6.{norm}.weight": torch.ones(48) for norm in ("enorm", "hnorm")}
    save_file(weights | extra | head, tmp_path / "model.safetensors")
    with caplog.at_level(logging.WARNING, "denim"):
        model = load(tmp_path)
    assert len(model.blocks) == 6 and "MTP head" in caplog.text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kda_lower_bound", 5),
        ("no_kda_lora", False),
        ("gated_attention_proj_granularity_type", "element_wise"),
        ("scoring_func", "softmax"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("layer_group_size", 5),
        ("rotary_dim", 32),
        ("n_group", 7),
        ("expert_swiglu_limit_list", [7.0]),
        ("quantization_config", {"bits": 4}),
    ],
)
def test_what_is_not_covered_is_named(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        read_spec(FLASH | {key: value})


def test_the_softplus_gate_has_no_floor() -> None:
    spec = read_spec(FLASH | {"kda_safe_gate": False})
    assert {getattr(layer.mixer, "decay_floor", None) for layer in spec.layers} == {None}
    assert read_spec(FLASH).layers[0].mixer.decay_floor == -5.0
