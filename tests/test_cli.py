"""The command `denim` as a shell sees it: output, one-line errors, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import denim
from denim import CapacityError, CheckpointError, ConfigError, RequestError, cli
from tests.spec.configs import qwen3_5_0_8b_text


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "denim.cli", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("x"), 2), (RequestError("x"), 2), (CapacityError("x"), 3), (CheckpointError("x"), 1)],
)
def test_exit_codes(error: denim.DenimError, code: int) -> None:
    assert cli.exit_code(error) == code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ledger", "/no/such/model"), "/no/such/model does not exist"),
        (("ledger", "CONFIG", "--lengths", "many"), "--lengths is 'many'"),
        (("ledger", "CONFIG", "--kv-dtype", "int3"), "kv_dtype is 'int3'"),
        (("plan", "CONFIG", "--device", "B200"), "--device is 'B200'; known: H200"),
        (("plan", "CONFIG", "--memory", "much"), "--memory='much'"),
        (("plan", "CONFIG", "--lognormal", "1"), "--lognormal is '1'"),
        (("plan", "CONFIG", "--trace", "/no/such/trace"), "--trace /no/such/trace cannot be read"),
        (("plan", "CONFIG", "--tensor-parallel", "3"), "--tensor-parallel is 3"),
        (("inspect", "/no/such/model"), "/no/such/model does not exist"),
        (("generate", "x", "--temperature", "-1"), "temperature=-1"),
        (("generate", "x", "--max-tokens", "0"), "max_tokens=0"),
        (("generate", "x", "--model", "/no/such/model"), "'/no/such/model' is not a folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(qwen3_5_0_8b_text()))
    done = run(*(str(config) if argument == "CONFIG" else argument for argument in arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.startswith("denim: ")
    assert done.stderr.count("\n") == 1


def test_ctrl_c_before_the_command_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130


def test_unknown_option_is_exit_code_2() -> None:
    assert run("ledger", "--colour").returncode == 2


def test_version() -> None:
    assert run("--version").stdout == f"denim {denim.__version__}\n"


def test_help_lists_the_commands() -> None:
    done = run("--help")
    assert done.returncode == 0
    for command in ("generate", "chat", "ledger", "plan", "inspect", "doctor"):
        assert command in done.stdout


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_help_says_every_name_and_sentence_in_full(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for path, command in commands(get_command(cli.app)):
        shown = CliRunner().invoke(cli.app, [*path, "--help"]).stdout
        for parameter in command.params:
            for option in (*parameter.opts, *parameter.secondary_opts):
                assert not option.startswith("-") or option in shown, (path, option)
        if columns >= 80:
            assert "..." not in shown.replace("[ARGS]...", ""), path


def test_ledger_of_the_embedded_model_is_the_default() -> None:
    done = run("ledger", "--json")
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["layers"]) == {"L", "F"}


def test_a_terminal_without_some_characters_shows_the_others() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "denim.cli", "ledger"]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"denim-tiny: LLLF ? 2 layers" in done.stdout


def test_a_plan_that_does_not_fit_is_exit_code_3() -> None:
    done = run("plan", "--memory", "1KiB")
    assert (done.returncode, done.stdout) == (3, "")
    assert "too little for one request" in done.stderr


def test_generate_streams_from_the_embedded_model() -> None:
    done = run("generate", "-", "--max-tokens", "8", "--temperature", "0", stdin="Once upon a time")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "8 tokens, the first after" in done.stderr
