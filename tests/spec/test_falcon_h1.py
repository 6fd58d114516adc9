"""What the reader of Falcon-H1 refuses, that no multiplier is lost, and the larger sizes' geometry."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from denim.errors import ConfigError
from denim.ledger.cost import ledger_json
from denim.spec.published import FOLDER as CONFIGS
from denim.spec.reader import read_spec

CONFIG = CONFIGS / "falcon-h1-0.5b.json"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mlp_bias", True),
        ("projectors_bias", True),
        ("mamba_use_mlp", False),
        ("ssm_multipliers", [1.0, 1.0]),
        ("mlp_multipliers", [1.0, "x"]),
        ("key_multiplier", 0),
        ("mamba_d_head", 32),
    ],
)
def test_refused(key: str, value: object) -> None:
    config = json.loads(CONFIG.read_text())
    with pytest.raises(ConfigError, match=key):
        read_spec(config | {key: value})


def test_multipliers() -> None:
    details = asdict(read_spec(json.loads(CONFIG.read_text())).details)
    assert details["ssm_parts"] == pytest.approx((8**-0.5, 0.25, 8**-0.5, 0.5, 8**-0.5))
    assert (details["attention_out"], details["ssm_in"], details["mlp_down"]) == (0.9375, 1.25, 0.5859375)
    assert details["norm_before_gate"] is False


# Layers, hidden, heads, KV heads, Mamba2 heads and their dim, groups as in the table of FalconH1Config.
# Their multipliers are not at hand: no published configs. Parameters by the report (arXiv 2507.22448).
SIZES = {
    "1.5B": (24, 2048, 8, 2, 48, 64, 1, 4608, 65537, 1.55),
    "1.5B-Deep": (66, 1280, 6, 2, 24, 64, 1, 3072, 65537, 1.55),
    "3B": (32, 2560, 10, 2, 32, 128, 1, 6144, 65537, 3.15),
    "7B": (44, 3072, 12, 2, 24, 128, 1, 12288, 130049, 7.59),
    "34B": (72, 5120, 20, 4, 32, 128, 2, 21504, 261120, 33.6),
}


@pytest.mark.parametrize("size", SIZES)
def test_geometry_of_the_larger_sizes(size: str) -> None:
    layers, hidden, heads, kv_heads, ssm_heads, ssm_dim, groups, width, vocab, billions = SIZES[size]
    config = json.loads(CONFIG.read_text()) | {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "mamba_n_heads": ssm_heads,
        "mamba_d_head": ssm_dim,
        "mamba_d_ssm": ssm_heads * ssm_dim,
        "mamba_d_state": 256,
        "mamba_n_groups": groups,
        "intermediate_size": width,
        "vocab_size": vocab,
    }
    values = ledger_json(read_spec(config))
    assert values["layers"] == "P" * layers
    assert values["parameters"] == pytest.approx(billions * 1e9, rel=5e-3)
    assert values["kv_bytes_per_token"] == layers * 2 * kv_heads * 128 * 2
    assert values["state_bytes"] == layers * ssm_heads * ssm_dim * 256 * 4
    assert values["conv_bytes"] == layers * 3 * (ssm_heads * ssm_dim + 2 * groups * 256) * 2
