"""Finding a config and choosing its family's reader."""

from __future__ import annotations

import json
from errno import EACCES
from os import strerror
from pathlib import Path

import pytest

from denim.errors import ConfigError
from denim.spec import read_generation_defaults, read_spec
from tests.spec.configs import qwen3_5_0_8b_text


def test_dict_file_and_folder_give_the_same(tmp_path: Path) -> None:
    config = qwen3_5_0_8b_text()
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_spec(config) == read_spec(tmp_path) == read_spec(str(tmp_path / "config.json"))


def test_unknown_family_lists_the_supported_ones() -> None:
    with pytest.raises(ConfigError, match=r"'model_type' is 'llama'; supported: .*qwen3_5, qwen3_5_moe, "):
        read_spec({"model_type": "llama"})


@pytest.mark.parametrize("kind", [None, ["qwen3_5"]])
def test_model_type_missing_or_no_name(kind: object) -> None:
    with pytest.raises(ConfigError, match="'model_type' is .*supported: .*qwen3_5"):
        read_spec({"model_type": kind})


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_spec(tmp_path)


def test_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        read_spec(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_config_that_is_no_json_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_spec(tmp_path)


def test_dtype_is_the_callers_or_the_configs() -> None:
    config = qwen3_5_0_8b_text() | {"dtype": "float16"}
    assert read_spec(config).dtype == "float16"
    assert read_spec(config, dtype="float32").dtype == "float32"
    with pytest.raises(ConfigError, match="dtype is 'int8'"):
        read_spec(config, dtype="int8")
    with pytest.raises(ConfigError, match="state_dtype is 'fp32'"):
        read_spec(config, state_dtype="fp32")
    with pytest.raises(ConfigError, match="'torch_dtype' is 'bfloat16'; supported: 'float16'"):
        read_spec(config | {"torch_dtype": "bfloat16"})


def test_errors_name_the_file_that_was_given(tmp_path: Path) -> None:
    mine = tmp_path / "my.json"
    for config, told in (
        (qwen3_5_0_8b_text() | {"hidden_size": 0}, r"my\.json: 'hidden_size' is 0"),
        ({"model_type": "llama"}, r"my\.json: 'model_type' is 'llama'"),
    ):
        mine.write_text(json.dumps(config))
        with pytest.raises(ConfigError, match=f"^{told}"):
            read_spec(mine)
        (tmp_path / "config.json").write_text(json.dumps(config))
        for source in (config, tmp_path):
            with pytest.raises(ConfigError, match=f"^{told.replace('my', 'config')}"):
                read_spec(source)
    mine.write_text(json.dumps(qwen3_5_0_8b_text() | {"eos_token_id": "no"}))
    with pytest.raises(ConfigError, match=r"^my\.json: 'eos_token_id' is 'no'"):
        read_generation_defaults(mine)


@pytest.mark.parametrize("call", ["is_dir", "read_text"])
def test_a_config_that_may_not_be_read(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(qwen3_5_0_8b_text()))

    def refuse(place: Path, **_: object) -> None:  # a chmod would not keep root out
        raise PermissionError(EACCES, strerror(EACCES), str(place))

    monkeypatch.setattr(Path, call, refuse)
    with pytest.raises(
        ConfigError, match=r"config\.json cannot be read: Permission denied; give a path that"
    ):
        read_spec(path)
