"""RoPE frequencies against transformers, YaRN with all its keys among them."""

from __future__ import annotations

import pytest
import torch

from denim.layers.rotary import Rotary, inverse_frequencies, rotate
from denim.spec.model import Rope
from denim.spec.reader import read_spec
from tests.tiny import config_values

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        YARN,
        YARN | {"beta_fast": 8.0, "beta_slow": 2.0},
        YARN | {"attention_factor": 0.7},
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
        YARN | {"truncate": False},
        YARN | {"beta_fast": 32.0, "beta_slow": 25.0},  # the ramp begins and ends at the first frequency
        YARN | {"rope_theta": 2.0},
        YARN | {"factor": 1.0},
    ],
    ids=str,
)
def test_frequencies_equal_the_reference(parameters: dict) -> None:
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

    values = config_values(
        head_dim=64, rope_parameters=parameters | {"partial_rotary_factor": 0.5}, max_position_embeddings=512
    )
    config = Qwen3_5TextConfig(**values, intermediate_size=80)
    reference = Qwen3_5TextRotaryEmbedding(config)
    spec = read_spec(config.to_dict())
    frequencies, factor = inverse_frequencies(spec.rope, 32, "cpu")
    torch.testing.assert_close(frequencies, reference.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(reference.attention_scaling)


def test_rotation_keeps_lengths_and_the_rest_of_a_head() -> None:
    rotary = Rotary(Rope(theta=10000.0), 12, "cpu")
    x = torch.randn(9, 6, 24)
    cos, sin = rotary.angles(torch.arange(9), torch.float32)
    turned = rotate(x, cos, sin)
    assert torch.equal(turned[..., 12:], x[..., 12:])
    assert torch.equal(turned[0], x[0])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
