"""What the readers of Mamba and Falcon-Mamba make of keys that contradict, and what they refuse."""

from __future__ import annotations

import json

import pytest

from denim.errors import ConfigError
from denim.spec.linear import Mamba1
from denim.spec.published import FOLDER as CONFIGS
from denim.spec.reader import read_spec


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("ssm_cfg", {"layer": "Mamba2"}),
        ("rms_norm", False),
        ("d_model", 512),
        ("time_step_rank", "half"),
        ("attn_cfg", {}),
    ],
)
def test_refused(key: str, value: object) -> None:
    config = json.loads((CONFIGS / "mamba-130m-hf.json").read_text())
    with pytest.raises(ConfigError, match=key):
        read_spec(config | {key: value})


def test_intermediate_size_goes_before_expand() -> None:
    config = json.loads((CONFIGS / "falcon-mamba-7b.json").read_text())
    assert config["expand"] == 16
    mixer = read_spec(config).layers[0].mixer
    assert isinstance(mixer, Mamba1)
    assert mixer.inner == 8192
    del config["intermediate_size"]
    mixer = read_spec(config | {"time_step_rank": "auto", "hidden_size": 4097}).layers[0].mixer
    assert isinstance(mixer, Mamba1)
    assert (mixer.inner, mixer.dt_rank) == (16 * 4097, 257)


def test_no_kv_at_all() -> None:
    spec = read_spec(json.loads((CONFIGS / "mamba-2.8b-hf.json").read_text()))
    assert spec.attention_layers == ()
    assert len(spec.linear_layers) == 64
    assert spec.rope is None


@pytest.mark.parametrize("name", ["mamba-130m-hf", "falcon-mamba-7b", "mamba-codestral-7b"])
def test_hidden_states_are_added_up_in_fp32_unless_the_config_says_otherwise(name: str) -> None:
    """As transformers does."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    for written, wide in ((None, True), (True, True), (False, False)):
        details = read_spec(config | {"residual_in_fp32": written}).details
        assert (details.fp32_residual if name.startswith("mamba-c") else details.wide_residual) is wide


def test_norms_of_falcon_mamba_have_an_epsilon_of_their_own() -> None:
    config = json.loads((CONFIGS / "falcon-mamba-7b.json").read_text())
    assert read_spec(config | {"mixer_rms_eps": None}).details.mixer_norm_eps == 1e-6
    assert read_spec(config | {"mixer_rms_eps": 1e-4}).details.mixer_norm_eps == 1e-4
