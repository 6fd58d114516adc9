"""What the reader of Falcon-H1 refuses, and that no multiplier is lost."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from denim.errors import ConfigError
from denim.spec.reader import read_spec

CONFIG = Path(__file__).parents[1] / "families" / "configs" / "falcon-h1-0.5b.json"


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
