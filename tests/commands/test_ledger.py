"""`denim ledger`: fast, without torch, and right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from denim.cli import app
from denim.commands.ledger import default_lengths, parse_lengths, show_ledger
from denim.errors import ConfigError
from denim.spec import read_spec
from tests.spec.configs import qwen3_5_0_8b


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "Qwen3.5-0.8B"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(qwen3_5_0_8b()))
    return place


def ledger(model: Path, lengths: str | None = None, as_json: bool = False) -> None:
    show_ledger(model, lengths, "auto", "auto", "auto", as_json)


def test_answers_without_torch(folder: Path) -> None:
    code = (
        "import sys\n"
        "from denim.cli import app\n"
        "app(['ledger', sys.argv[1], '--json'], standalone_mode=False)\n"
        "heavy = [name for name in ('torch', 'transformers', 'numpy') if name in sys.modules]\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["crossover_tokens_stored_width"] == 536


def test_json_is_the_ledger(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger(folder / "config.json", lengths="100, 1_000", as_json=True)
    values = json.loads(capsys.readouterr().out)
    assert values["layers"] == "LLLF" * 6
    assert [row["tokens"] for row in values["lengths"]] == [100, 1000]


def test_table_shows_the_figures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger(folder)
    text = capsys.readouterr().out
    for figure in (
        "Qwen3.5-0.8B: LLLF × 6",
        "12 KiB of KV (48 KiB",
        "18 MiB of state",
        "648 KiB",
        "530 tokens",
    ):
        assert figure in text
    row = next(line for line in text.splitlines() if " 4,096 " in line)
    assert row.split()[:5] == ["4,096", "66.6", "MiB", "192", "MiB"]


def test_lengths_beyond_the_model(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--lengths has 262,145; this model takes at most 262,144 tokens"):
        ledger(folder, lengths="100,262145")


def test_no_length_at_all_is_not_the_default(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--lengths is ''; give positive whole numbers"):
        ledger(folder, lengths="")


def test_default_lengths_end_with_the_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = qwen3_5_0_8b()
    config["text_config"]["max_position_embeddings"] = 5000
    (tmp_path / "config.json").write_text(json.dumps(config))
    ledger(tmp_path, as_json=True)
    lengths = json.loads(capsys.readouterr().out)["lengths"]
    assert [row["tokens"] for row in lengths] == [512, 1024, 4096, 5000]
    assert default_lengths(read_spec(qwen3_5_0_8b())) == [512, 1024, 4096, 32768, 262144]


@pytest.mark.parametrize("text", ["", "12,", "0", "-5", "1k", "1.5"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--lengths"):
        parse_lengths(text)


@pytest.mark.parametrize("command", ["ledger", "plan", "inspect"])
def test_a_name_is_shown_as_it_is(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not read as markup."""
    place = tmp_path / "tuned [bold] [red]"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(qwen3_5_0_8b()))
    monkeypatch.setenv("COLUMNS", "200")
    app([command, str(place)], standalone_mode=False)
    assert place.name in capsys.readouterr().out
