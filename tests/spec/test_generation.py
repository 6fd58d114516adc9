"""Sampling defaults and end tokens, from the files that a model folder may hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from denim.errors import ConfigError
from denim.spec import GenerationDefaults, read_generation_defaults
from tests.spec.configs import qwen3_5_0_8b


def folder(path: Path, config: dict[str, Any], generation: dict[str, Any] | None) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_without_the_file_only_end_tokens(tmp_path: Path) -> None:
    expected = GenerationDefaults(end_token_ids=(248044,))
    assert read_generation_defaults(folder(tmp_path, qwen3_5_0_8b(), None)) == expected
    assert read_generation_defaults(qwen3_5_0_8b()) == expected
    assert read_generation_defaults({"model_type": "qwen3_5_text"}) == GenerationDefaults()


def test_all_defaults_and_all_end_tokens(tmp_path: Path) -> None:
    stated = {"temperature": 1.0, "top_p": 0.95, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.1}
    generation = {"do_sample": True, "eos_token_id": [248046], "transformers_version": "5", **stated}
    place = folder(tmp_path, qwen3_5_0_8b() | {"eos_token_id": [248046, 7]}, generation)
    expected = GenerationDefaults(**stated, end_token_ids=(248046, 248044, 7))
    assert read_generation_defaults(place) == expected
    assert read_generation_defaults(place / "config.json") == expected


def test_no_sampling_means_temperature_zero(tmp_path: Path) -> None:
    place = folder(tmp_path, {}, {"do_sample": False, "temperature": 0.6})
    assert read_generation_defaults(place).temperature == 0.0


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"temperature": -1}, "'temperature' is -1"),
        ({"temperature": "hot"}, "'temperature' is 'hot'"),
        ({"top_p": 1.5}, "'top_p' is 1.5; supported: a positive number of at most 1"),
        ({"temperature": True}, "'temperature' is True"),
        ({"top_k": 2.5}, "'top_k' is 2.5"),
        ({"min_p": 1.5}, "'min_p' is 1.5; supported: a number from 0 to 1"),
        ({"repetition_penalty": 0}, "'repetition_penalty' is 0"),
        ({"do_sample": "no"}, "'do_sample' is 'no'"),
        ({"eos_token_id": "<end>"}, "'eos_token_id' is '<end>'"),
        ({"eos_token_id": [1, -1]}, r"'eos_token_id' is \[1, -1\]"),
    ],
)
def test_unusable_values_are_named(tmp_path: Path, generation: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"generation_config.json: {message}"):
        read_generation_defaults(folder(tmp_path, {}, generation))
