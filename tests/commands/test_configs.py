"""What people type where a config is due."""

from __future__ import annotations

import json
import os
from errno import EACCES
from pathlib import Path

import pytest
from typer.testing import CliRunner

from denim.cli import app
from denim.commands.configs import find_config
from denim.errors import ConfigError
from denim.spec import embedded_model
from denim.spec.published import published_configs


def test_a_folder_a_file_a_name_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "My-Model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({}))
    (tmp_path / "other.json").write_text(json.dumps({}))
    assert find_config(folder) == ("My-Model", folder, False)
    assert find_config(folder / "config.json") == ("My-Model", folder / "config.json", False)
    assert find_config(tmp_path / "other.json") == ("other", tmp_path / "other.json", False)
    assert find_config(None) == ("denim-tiny", embedded_model(), False)
    for typed in ("Nemotron-H-8B", "nemotron-h-8b"):
        assert find_config(Path(typed)) == ("Nemotron-H-8B", published_configs()["Nemotron-H-8B"], True)
    (tmp_path / "Nemotron-H-8B").mkdir()
    monkeypatch.chdir(tmp_path)
    assert not find_config(Path("Nemotron-H-8B")).published, "what lies here goes first"
    monkeypatch.chdir(folder)
    for here in (".", "config.json"):
        assert find_config(Path(here)).name == "My-Model"


def test_names_that_are_near_are_offered() -> None:
    with pytest.raises(ConfigError, match=r"such as .*MiniMax-Text-01"):
        find_config(Path("minimax-text"))
    with pytest.raises(ConfigError, match="/no/such/model does not exist; give a model folder"):
        find_config(Path("/no/such/model"))


def test_an_organisation_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = published_configs()["Qwen3.5-0.8B"]
    assert find_config(Path("Qwen/Qwen3.5-0.8B")) == ("Qwen3.5-0.8B", known, True)
    assert find_config(Path("unsloth/qwen3.5-0.8b")) == ("Qwen3.5-0.8B", known, True)
    for path in ("/Qwen3.5-0.8B", "../Qwen3.5-0.8B", "a/b/Qwen3.5-0.8B"):
        with pytest.raises(ConfigError, match="does not exist"):
            find_config(Path(path))
    with pytest.raises(ConfigError, match=r"Qwen/Qwen3\.5-1B does not exist; .*such as Qwen3\.5-0\.8B"):
        find_config(Path("Qwen/Qwen3.5-1B"))
    (tmp_path / "Qwen" / "Qwen3.5-0.8B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not find_config(Path("Qwen/Qwen3.5-0.8B")).published, "what lies here goes first"


def test_a_folder_that_may_not_be_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "stat", refuse)  # a chmod would not keep root out
    monkeypatch.setattr(Path, "is_dir", refuse)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: Permission denied; give a path"):
        find_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    "before",
    [["plan"], ["ledger"], ["inspect"], ["profile"], ["generate", "hi", "--model"]],
    ids=lambda b: b[0],
)
def test_commands_tell_it_in_their_own_line(
    before: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser of options would say it in a frame, and without what to do."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    monkeypatch.setattr(Path, "read_text", refuse)
    error = CliRunner().invoke(app, [*before, str(tmp_path)]).exception
    assert isinstance(error, ConfigError) and "config.json cannot be read: Permission denied" in str(error)


def refuse(path: Path, **_: object) -> None:
    raise PermissionError(EACCES, os.strerror(EACCES), str(path))
