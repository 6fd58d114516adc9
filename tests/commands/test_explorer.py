"""`denim plan --web`: what it was given is in its link, and what it cannot show is refused."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from denim.commands.explorer import link_query, show_explorer
from denim.errors import ConfigError
from tests.spec.configs import qwen3_5_0_8b

PLAIN = {
    "device": "H200",
    "gpus": None,
    "lengths": None,
    "lognormal": None,
    "dtype": "auto",
    "state_dtype": "auto",
    "kv_dtype": "auto",
}


def test_served_until_interrupted(tmp_path: Path) -> None:
    folder = tmp_path / "Mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(qwen3_5_0_8b()))
    command = [
        sys.executable,
        "-m",
        "denim.cli",
        "plan",
        str(folder),
        "--web",
        "--port",
        "0",
        "--device",
        "l40s",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            link = process.stdout.readline().split()[-1]
            with urlopen(link) as page:
                title = re.search("<title>(.*)</title>", page.read().decode())
            with urlopen(link.replace("/?", "/api/explore?")) as reply:
                shown = json.load(reply)
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130
        finally:
            process.kill()
    assert link.endswith("/?model=Mine&device=L40S")
    assert title is not None and title[1] == "Denim explorer"
    assert shown["headline"].startswith("One L40S holds")


@pytest.mark.parametrize(
    ("model", "options", "traced", "query"),
    [
        (None, {}, False, {}),
        ("Mine", {"device": "h100", "gpus": 2}, False, {"model": "Mine", "device": "H100", "gpus": "2"}),
        (None, {"lengths": "512"}, False, {"tokens": "512"}),
        (None, {"lognormal": "500, 1.2"}, False, {"lengths": "lognormal", "tokens": "500", "sigma": "1.2"}),
        (None, {"kv_dtype": "float8_e4m3fn"}, True, {"kv_dtype": "float8_e4m3fn", "lengths": "trace"}),
    ],
)
def test_the_link(model: str | None, options: dict, traced: bool, query: dict[str, str]) -> None:
    assert link_query(model, PLAIN | options, traced) == query


@pytest.mark.parametrize(
    ("options", "traced", "seen"),
    [
        ({"lengths": "512,1024"}, False, "one length at a time"),
        ({"lengths": "512", "lognormal": "3,1"}, False, "--lengths and --lognormal exclude each other"),
        ({"lengths": "512"}, True, "--lengths and --trace exclude each other"),
        ({"device": "TPU"}, False, "known: H200"),
    ],
)
def test_a_link_that_cannot_be(options: dict, traced: bool, seen: str) -> None:
    with pytest.raises(ConfigError, match=seen):
        link_query(None, PLAIN | options, traced)


def test_refused_before_anything_is_served() -> None:
    with pytest.raises(ConfigError, match="--drafts and --compare cannot be shown on the page"):
        show_explorer(None, 0, PLAIN, None, ["--drafts", "--compare"])
    with pytest.raises(ConfigError, match="sigma='x': input should be a valid number"):
        show_explorer(None, 0, PLAIN | {"lognormal": "3,x"}, None, [])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port} cannot be used"):
            show_explorer(None, port, PLAIN, None, [])
    with pytest.raises(ConfigError, match="--port 70000 cannot be used"):
        show_explorer(None, 70000, PLAIN, None, [])
