"""Requests that the server itself ends, because it stops and waits no longer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from denim.server.app import create_app
from denim.server.options import ServerOptions
from tests.server.scripted import ScriptedEngine

SCOPE = {
    "type": "http",
    "asgi": {"version": "3.0"},
    "http_version": "1.1",
    "method": "POST",
    "path": "/v1/completions",
    "raw_path": b"/v1/completions",
    "query_string": b"",
    "headers": [(b"content-type", b"application/json")],
    "client": ("127.0.0.1", 1),
    "server": ("127.0.0.1", 2),
    "scheme": "http",
    "root_path": "",
}
BODY = {"model": "scripted", "prompt": "x"}


def cut(engine: ScriptedEngine, body: dict[str, Any] | None, begun: Any) -> tuple[dict[str, Any], str]:
    """Ask (None: with a body that does not come), and have the server end it once `begun(sent)`; the start of
    the response, and its text."""

    async def scene() -> None:
        content = asyncio.Queue[dict[str, Any]]()
        if body is not None:
            content.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})

        async def send(message: Any) -> None:
            sent.append(message)

        task = asyncio.create_task(app({**SCOPE}, content.get, send))
        for _ in range(5):
            await asyncio.sleep(0)
        while not begun(sent):
            await asyncio.sleep(0)
        task.cancel()
        await task

    sent: list[dict[str, Any]] = []
    app = create_app(engine, ServerOptions(log_requests=False))
    asyncio.run(asyncio.wait_for(scene(), 60))
    gate = app.state.serving.gate
    assert (gate.open, gate.waiting) == (0, 0) and engine._waiting.idle
    assert not sent[-1].get("more_body")
    return sent[0], b"".join(message.get("body", b"") for message in sent).decode()


@pytest.fixture
def endless(tmp_path: Path) -> ScriptedEngine:
    engine = ScriptedEngine(tmp_path)
    engine.say("some words", ends=None)
    return engine


@pytest.mark.parametrize("stream", [False, True])
def test_before_the_answer(endless: ScriptedEngine, stream: bool) -> None:
    endless.pause = 1000.0
    start, text = cut(endless, BODY | {"stream": stream}, lambda sent: endless.added)
    assert start["status"] == 503
    assert json.loads(text)["error"]["message"].startswith("the server stopped")
    assert len(endless.aborted) == 1


def test_before_the_body(endless: ScriptedEngine) -> None:
    start, text = cut(endless, None, lambda sent: True)
    assert start["status"] == 503 and (b"retry-after", b"5") in start["headers"]
    assert json.loads(text)["error"]["type"] == "service_unavailable_error"


def test_in_the_middle_of_a_stream(endless: ScriptedEngine) -> None:
    start, text = cut(endless, BODY | {"stream": True}, lambda sent: len(sent) > 2)
    assert start["status"] == 200
    *_, error, done = text.strip().split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["message"].startswith("the server stopped")
    assert done == "data: [DONE]"
    assert len(endless.aborted) == 1
