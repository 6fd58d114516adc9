"""What `denim serve` refuses before it serves; its life is in tests/server/test_life.py."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from denim import ConfigError
from denim.commands.serve import serve


@pytest.fixture(autouse=True)
def same_log() -> Iterator[None]:
    """The command sets up logging for its process."""
    loggers = [logging.getLogger(name) for name in ("denim", "uvicorn")]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.level, logger.propagate = handlers, level, propagate


@pytest.mark.parametrize(
    ("engine", "server", "message"),
    [
        ({}, {"port": 70000}, "port=70000"),
        ({}, {"max_streams": 0}, "max_streams=0"),
        ({}, {"host": "no.such.host.invalid"}, "cannot listen on no.such.host.invalid:8000"),
        ({"model": "/no/such/model"}, {"port": 0}, "'/no/such/model' is not a folder"),
        ({"checkpoint_policy": "some"}, {"port": 0}, "checkpoint_policy='some'"),
    ],
    ids=str,
)
def test_what_cannot_work(engine: dict[str, Any], server: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        serve(engine, server, quiet=True)


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}.*take another"):
            serve({}, {"port": port}, quiet=True)


def test_without_the_libraries() -> None:
    code = "import sys; sys.modules['uvicorn'] = None; from denim.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "serve"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("denim: denim serve needs uvicorn")
    assert "denim-llm[serve]" in done.stderr
