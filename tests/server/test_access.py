"""Request ids, trace headers, log lines, keys, CORS."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from starlette.types import Message, Receive, Scope, Send

from denim.server.access import AccessLayer
from denim.server.log import JsonLines, TextLines, set_up_log
from denim.server.metrics import Metrics
from tests.server.live import Live, live
from tests.server.scripted import ScriptedEngine

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


@pytest.fixture
def script(tmp_path: Path) -> ScriptedEngine:
    return ScriptedEngine(tmp_path, "some words")


@pytest.fixture
def lines() -> Iterator[list[logging.LogRecord]]:
    """What the server logs meanwhile."""
    caught: list[logging.LogRecord] = []

    class Catch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            caught.append(record)

    logger, handler = logging.getLogger("denim.server"), Catch()
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    yield caught
    logger.removeHandler(handler)
    logger.setLevel(before)


def test_every_answer_has_an_id(http: httpx.Client) -> None:
    for path in ("/health", "/nothing", "/v1/models"):
        assert len(http.get(path).headers["x-request-id"]) == 32
    assert http.post("/v1/completions", json={}).headers["x-request-id"]


def test_an_id_of_the_client_is_kept(http: httpx.Client) -> None:
    response = http.post(
        "/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"x-request-id": "mine-7"}
    )
    assert response.headers["x-request-id"] == "mine-7"
    assert response.json()["id"] == "cmpl-mine-7"
    assert "request-id" not in response.headers, "that is Anthropic's"


@pytest.mark.parametrize("given", ["", "two words", "x" * 129, "tab\there"])
def test_an_id_that_would_break_a_log_is_not(http: httpx.Client, given: str) -> None:
    assert http.get("/health", headers={"x-request-id": given}).headers["x-request-id"] != given


def test_the_same_id_twice_is_no_conflict(http: httpx.Client) -> None:
    headers = {"x-request-id": "again"}
    body = {"prompt": "x", "max_tokens": 60, "stream": True, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json=body, headers=headers) as first:
        assert first.status_code == 200
        assert http.post("/v1/completions", json=CHAT | {"prompt": "x"}, headers=headers).status_code == 400
        assert http.post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 200


def test_traces_pass_through(http: httpx.Client) -> None:
    headers = {"traceparent": TRACE, "tracestate": "vendor=1"}
    response = http.get("/health", headers=headers)
    assert {name: response.headers[name] for name in headers} == headers
    for broken in (
        "x",
        TRACE.upper(),
        TRACE.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32),
        "ff" + TRACE[2:],
    ):
        assert "traceparent" not in http.get("/health", headers={"traceparent": broken}).headers


def test_a_line_says_what_a_request_was(script: ScriptedEngine, lines: list[logging.LogRecord]) -> None:
    script.cached = 1
    with live(script, log_requests=True) as server:
        headers = {"traceparent": TRACE, "x-request-id": "r1"}
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "abcde", "stream": True}, headers=headers)
        httpx.get(f"{server.url}/v1/models/x")
    first, second = (record.fields for record in lines)  # type: ignore[attr-defined]
    assert first.pop("seconds") >= first.pop("seconds_to_first_token") > 0
    assert first == {
        "request_id": "r1",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "trace_id": TRACE.split("-")[1],
        "model": "scripted",
        "stream": True,
        "prompt_tokens": 5,
        "cached_tokens": 1,
        "completion_tokens": len(script._ids()),
        "finish_reasons": {"stop": 1},
    }
    assert "5 tokens in (1 cached)" in lines[0].getMessage()
    assert (second["status"], second["path"]) == (404, "/v1/models/x")
    assert "'x' is not served here" in second["error"]
    assert "prompt_tokens" not in second


def test_a_failure_in_mid_stream_is_in_the_line(
    script: ScriptedEngine, lines: list[logging.LogRecord]
) -> None:
    script.say("some words", ends="error")
    with live(script, log_requests=True) as server:
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "stream": True})
    assert lines[0].fields["status"] == 500  # type: ignore[attr-defined]
    assert "the engine failed" in lines[0].fields["error"]  # type: ignore[attr-defined]


def test_lines_in_json() -> None:
    record = logging.LogRecord("denim.server", logging.INFO, "", 0, "a %s line", ("nice",), None)
    record.fields = {"status": 200, "path": "/ü"}
    line = json.loads(JsonLines().format(record))
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "denim.server",
        "message": "a nice line",
        "status": 200,
        "path": "/ü",
    }


def test_what_a_client_sends_cannot_write_lines(
    script: ScriptedEngine, lines: list[logging.LogRecord]
) -> None:
    """A path holds what its escapes say; tracebacks keep their lines."""
    with live(script, log_requests=True) as server:
        httpx.get(f"{server.url}/a%0Adenim:%2000:00:00%20all%20is%20well%1b[2J%E2%80%A8%C2%9B")
    text = TextLines().format(lines[-1])
    assert "\\x0adenim: 00:00:00" in text and "\\x1b[2J\\u2028\\x9b 404" in text
    assert len(text.splitlines()) == 1
    assert len(JsonLines().format(lines[-1]).split("\n")) == 1
    failed = logging.LogRecord("denim", logging.ERROR, "", 0, "x", (), (ValueError, ValueError("y"), None))
    assert TextLines().format(failed).endswith("x\nValueError: y")


@pytest.mark.parametrize("form", ["text", "json"])
def test_where_lines_go(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    loggers = [logging.getLogger(name) for name in ("denim", "uvicorn")]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    try:
        set_up_log(form, logging.INFO)
        logging.getLogger("denim.server").info("hello")
        logging.getLogger("uvicorn.error").info("not shown")
    finally:
        for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.level, logger.propagate = handlers, level, propagate
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert json.loads(err)["message"] == "hello" if form == "json" else err.startswith("denim: ")


# Faults of the server itself


def test_a_fault_is_a_500_with_an_id_and_a_traceback_in_the_log(
    script: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, lines: list[logging.LogRecord]
) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(script, "read", broken)
    with live(script) as server:
        response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})
        assert response.status_code == 500
        assert response.headers["x-request-id"]
        assert "secret" not in response.text
        assert response.json()["error"]["type"] == "server_error"
        assert httpx.get(f"{server.url}/health").status_code == 200
    assert any(record.exc_info and "secret" in str(record.exc_info[1]) for record in lines)


@pytest.mark.parametrize("begun", [False, True])
def test_a_fault_is_told_once_and_logged_as_one(
    script: ScriptedEngine, lines: list[logging.LogRecord], begun: bool
) -> None:
    """An answer that has begun cannot begin again; the log says that it failed all the same."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/x", "headers": []}
    asyncio.run(AccessLayer(app, Metrics(script.facts), True)(scope, None, send))  # type: ignore[arg-type]
    starts = [message["status"] for message in sent if message["type"] == "http.response.start"]
    assert starts == [200 if begun else 500]
    assert lines[-1].fields["status"] == 500 and "ZeroDivisionError" in lines[-1].fields["error"]


def test_other_protocols_pass(script: ScriptedEngine) -> None:
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    layer = AccessLayer(app, Metrics(script.facts), True)
    asyncio.run(layer({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert seen == ["lifespan"]


# Keys


@pytest.fixture
def locked(script: ScriptedEngine) -> Iterator[Live]:
    with live(script, api_keys=("first", "sécond")) as server:
        yield server


def test_keys(locked: Live) -> None:
    with httpx.Client(base_url=locked.url) as http:
        body = {"prompt": "x"}
        for headers, status in (
            ({}, 401),
            ({"authorization": "Bearer wrong"}, 401),
            ({"authorization": "Basic first"}, 401),
            ({"x-api-key": "firs"}, 401),
            ({"authorization": "Bearer first"}, 200),
            ({"x-api-key": "first"}, 200),
            ({"x-api-key": "sécond".encode()}, 200),
            ({"authorization": "Bearer first", "x-api-key": "wrong"}, 200),
            ({"authorization": "Bearer wrong", "x-api-key": "first"}, 401),
        ):
            response = http.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == status, headers
            if status == 401:
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"


def test_what_is_open_and_what_is_not(locked: Live) -> None:
    with httpx.Client(base_url=locked.url) as http:
        for path in ("/health", "/ready", "/metrics", "/version", "/openapi.json", "/docs"):
            assert http.get(path).status_code == 200, path
        for path in ("/v1/models", "/stats", "/prefix_cache", "/is_sleeping"):
            assert http.get(path).status_code == 401, path
        for path in (
            "/reset_prefix_cache",
            "/sleep",
            "/wake_up",
            "/tokenize",
            "/v1/messages",
            "/v1/responses",
        ):
            assert http.post(path, json={}).status_code == 401, path


def test_the_client_is_told_of_a_wrong_key(locked: Live) -> None:
    with (
        openai.OpenAI(base_url=f"{locked.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError, match="wrong API key"),
    ):
        client.models.list()


# CORS


def test_cors_is_off(http: httpx.Client) -> None:
    response = http.get("/health", headers={"origin": "https://page.example"})
    assert "access-control-allow-origin" not in response.headers


def test_cors_for_named_origins(script: ScriptedEngine) -> None:
    with (
        live(script, cors_origins=("https://page.example",)) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
        allowed = http.options("/v1/completions", headers=asked | {"origin": "https://page.example"})
        assert allowed.headers["access-control-allow-origin"] == "https://page.example"
        refused = http.options("/v1/completions", headers=asked | {"origin": "https://other.example"})
        assert "access-control-allow-origin" not in refused.headers
