"""Parameter counts against the models that transformers builds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from denim.ledger import count_parameters, weight_bytes
from denim.ledger.parameters import multiplied_parameters
from denim.models.registry import family_of
from denim.spec import read_spec
from tests.families.small import configs
from tests.spec.configs import qwen3_5_0_8b_text, qwen3_5_35b_a3b_text


def transformers_count(keys: dict[str, Any], class_name: str) -> int:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        cls = getattr(transformers, class_name)
        model = cls(cls.config_class(**{k: v for k, v in keys.items() if k != "full_attention_interval"}))
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("keys", "class_name"),
    [
        (qwen3_5_0_8b_text(), "Qwen3_5ForCausalLM"),
        (qwen3_5_0_8b_text() | {"tie_word_embeddings": False}, "Qwen3_5ForCausalLM"),
        (qwen3_5_35b_a3b_text(), "Qwen3_5MoeForCausalLM"),
    ],
)
def test_counts_match_transformers(keys: dict[str, Any], class_name: str) -> None:
    counts = count_parameters(read_spec(keys))
    assert counts.total - counts.mtp == transformers_count(keys, class_name)


@pytest.mark.parametrize("name", configs())
def test_every_weight_of_every_family_is_counted(name: str) -> None:
    spec = read_spec(configs()[name])
    model = family_of(spec).build(spec, chunk_size=64, device="meta")
    assert count_parameters(spec).total == sum(target.numel() for target in model.targets().values())


def test_mtp_head_of_the_published_0_8b() -> None:
    """mtp.fc [1024, 2048], four norms of 1024 around and in it, and one full-attention layer."""
    counts = count_parameters(read_spec(qwen3_5_0_8b_text()))
    attention = 1024 * (2 * 2048 + 2 * 512) + 2048 * 1024 + 2 * 256
    assert counts.mtp == 1024 * 2048 + 3 * 1024 + (attention + 3 * 1024 * 3584 + 2 * 1024)


def test_weights_take_the_models_dtype() -> None:
    spec = read_spec(qwen3_5_0_8b_text())
    assert weight_bytes(spec) == 2 * count_parameters(spec).total
    assert weight_bytes(replace(spec, dtype="float32")) == 2 * weight_bytes(spec)


def test_a_token_meets_the_chosen_experts_only() -> None:
    keys = qwen3_5_35b_a3b_text()
    few, many = (
        multiplied_parameters(read_spec(keys | changed))
        for changed in ({}, {"num_experts": 300, "num_experts_per_tok": 9})
    )
    assert many - few == 40 * (44 * 2048 + 3 * 2048 * 512)
