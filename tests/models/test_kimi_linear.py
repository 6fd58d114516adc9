"""Kimi Linear from both forms of checkpoint, and the two forms of its latent attention."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from denim.errors import ConfigError
from denim.layers.latent_attention import LatentAttentionLayer
from denim.models.weights import load_model
from denim.spec.reader import read_spec
from tests.exactness.harness import tokens_of
from tests.families.kimi_linear import oracle, save
from tests.families.row import VOCAB
from tests.tiny import Bench


def load(folder: Path) -> torch.nn.Module:
    return load_model(read_spec(folder), folder, device="cpu", chunk_size=64)


def test_transformers_own_names_and_config(tmp_path: Path) -> None:
    """What save_pretrained writes is read as what is published, tensor by tensor."""
    save(tmp_path / "published")
    oracle().save_pretrained(tmp_path / "saved")
    assert read_spec(tmp_path / "published") == read_spec(tmp_path / "saved")
    published, saved = (load(tmp_path / form).targets() for form in ("published", "saved"))
    assert published.keys() == saved.keys()
    assert all(torch.equal(published[name], saved[name]) for name in published)


def test_absorbed_and_expanded_attention_agree(tmp_path: Path) -> None:
    """Each form alone gives the same logits, whole and in segments over a filled page."""
    save(tmp_path)
    tokens = tokens_of(90, 3, VOCAB)
    logits = []
    for expand_from in (0, float("inf")):
        model = load(tmp_path)
        layers = [module for module in model.modules() if isinstance(module, LatentAttentionLayer)]
        assert len(layers) == 1 and layers[0].expand_from == 30
        layers[0].expand_from = expand_from
        bench = Bench(model, model.spec)
        cuts = [0, 37, 40, 41, 90]
        parts = [bench.run(tokens, a, b, slot_in=1 if a else -1, slot_out=1) for a, b in pairwise(cuts)]
        logits.append(torch.cat(parts))
    assert (logits[0] - logits[1]).abs().max() < 1e-4 * logits[0].std()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mla_use_nope", False),
        ("moe_router_activation_func", "softmax"),
        ("hidden_act", "situ"),
        ("num_key_value_heads", 2),
        ("topk_group", 4),
        ("num_experts_per_token", 5),
        (
            "linear_attn_config",
            {"head_dim": 16, "num_heads": 3, "short_conv_kernel_size": 4, "kda_layers": [1]},
        ),
        (
            "linear_attn_config",
            {
                "head_dim": 16,
                "num_heads": 3,
                "short_conv_kernel_size": 4,
                "kda_layers": [1, 2],
                "full_attn_layers": [2],
            },
        ),
    ],
)
def test_what_is_not_covered_is_named(key: str, value: object) -> None:
    config = {
        "model_type": "kimi_linear",
        "dtype": "float32",
        "vocab_size": 199,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "rms_norm_eps": 1e-5,
        "model_max_length": 4096,
        "hidden_act": "silu",
        "num_attention_heads": 6,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 14,
        "num_experts": 6,
        "num_experts_per_token": 3,
        "num_expert_group": 3,
        "topk_group": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 20,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "linear_attn_config": {
            "head_dim": 16,
            "num_heads": 3,
            "short_conv_kernel_size": 4,
            "kda_layers": [1],
            "full_attn_layers": [2],
        },
    }
    assert read_spec(config).pattern == "LF"
    with pytest.raises(ConfigError, match="kda_layers" if key == "linear_attn_config" else key):
        read_spec(config | {key: value})
