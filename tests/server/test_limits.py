"""How much the server takes on: full, too much at once, too late."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from denim.server import dashboard
from denim.server.errors import ApiError
from denim.server.limits import Gate
from denim.server.options import ServerOptions
from denim.server.serving import Serving
from tests.server.live import Live, live
from tests.server.patience import until
from tests.server.scripted import ScriptedEngine
from tests.server.slow_reader import slow_reader

ASK: dict[str, Any] = {"prompt": "x", "max_tokens": 100}


@pytest.fixture
def script(tmp_path: Path) -> ScriptedEngine:
    return ScriptedEngine(tmp_path, "some words")


@contextmanager
def client_of(server: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


@contextmanager
def streams(server: Live, count: int, **body: Any) -> Iterator[None]:
    """So many streams that have begun and go on until the end of the block."""
    with client_of(server) as client:
        open_streams = [
            client.stream("POST", "/v1/completions", json=ASK | {"stream": True} | body) for _ in range(count)
        ]
        responses = [stream.__enter__() for stream in open_streams]
        assert all(response.status_code == 200 for response in responses)
        yield
        for stream in open_streams:
            stream.__exit__(None, None, None)
    until(lambda: server.serving.gate.open == 0)


def test_a_full_server_says_when_to_come_back(script: ScriptedEngine) -> None:
    script.say("some words", ends=None)
    with live(script, max_streams=2) as server, streams(server, 2), client_of(server) as client:
        response = client.post("/v1/completions", json=ASK)
        error = response.json()["error"]
        assert response.status_code == 429
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert error["param"] == "max_streams"
        wait = int(response.headers["retry-after"])
        assert 1 <= wait <= 60
        assert f"try again in {wait} s, or raise max_streams" in error["message"]
        claude = client.post(
            "/v1/messages",
            json={"model": "scripted", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]},
        )
        assert claude.status_code == 429
        assert "max_streams=2" in claude.json()["error"]["message"], "there is no param in this API's errors"
        streamed = client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "stream": True}
        )
        assert streamed.status_code == 429, "a stream is refused before it begins"


def test_every_completion_takes_a_place(script: ScriptedEngine) -> None:
    script.say("some words", ends=None)
    with live(script, max_streams=4) as server, streams(server, 1, n=3), client_of(server) as client:
        assert server.serving.gate.open == 3
        assert client.post("/v1/completions", json=ASK | {"prompt": ["a", "b"]}).status_code == 429
        response = client.post("/v1/completions", json=ASK | {"n": 5})
        assert response.status_code == 400, "waiting would not help"
        error = response.json()["error"]
        assert error["param"] == "max_streams"
        assert "asks for 5 completions" in error["message"]


def test_a_prompt_longer_than_the_server_takes(script: ScriptedEngine) -> None:
    """The error names the field by the name that it has in each API."""
    long = "x" * 50
    with live(script, max_prompt_tokens=20) as server, client_of(server) as client:
        for path, field, prompt in (
            ("/v1/completions", "prompt", ["x", long]),
            ("/v1/chat/completions", "messages", [{"role": "user", "content": long}]),
            ("/v1/responses", "input", long),
        ):
            error = client.post(path, json={field: prompt}).json()["error"]
            assert (error["param"], error["code"]) == (field, "context_length_exceeded")
            assert "max_prompt_tokens=20 allows no more" in error["message"]
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_the_queue_is_what_has_no_token_yet(script: ScriptedEngine) -> None:
    script.say("x", pause=30.0)
    with live(script, max_queue=1) as server, client_of(server) as client:
        waiting = slow_reader(server.url, ASK)
        until(lambda: server.serving.gate.waiting == 1)
        response = client.post("/v1/completions", json=ASK)
        assert response.status_code == 429
        assert "max_queue=1" in response.json()["error"]["message"]
        assert response.json()["error"]["param"] == "max_queue"
        waiting.close()


def _post_quietly(url: str) -> None:
    with suppress(httpx.HTTPError):
        httpx.post(f"{url}/v1/completions", json=ASK, timeout=1)


def test_clients_wait_as_they_are_told(script: ScriptedEngine) -> None:
    """The official client tries again after Retry-After, and then it is served."""
    script.say("word", pause=0.3)
    with (
        live(script, max_streams=1) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=3) as client,
    ):
        first = threading.Thread(target=_post_quietly, args=(server.url,))
        first.start()
        until(lambda: server.serving.gate.open == 1)
        assert client.completions.create(model="scripted", prompt="x").choices[0].text == "word"
        first.join()


def test_the_first_token_is_late(script: ScriptedEngine) -> None:
    script.say("x", pause=30.0)
    with live(script, first_token_timeout=0.2) as server, client_of(server) as client:
        for stream in (False, True):
            response = client.post("/v1/completions", json=ASK | {"stream": stream})
            assert response.status_code == 504
            assert response.json()["error"]["param"] == "first_token_timeout"
        until(lambda: len(script.aborted) == 2)
        assert server.serving.gate.open == 0


def test_the_last_token_is_late(script: ScriptedEngine) -> None:
    script.say("some words", ends=None, pause=0.01)
    options = {"request_timeout": 1.2, "first_token_timeout": 1.1}
    with live(script, **options) as server, client_of(server) as client:
        response = client.post("/v1/completions", json=ASK)
        assert response.status_code == 504
        assert "request_timeout" in response.json()["error"]["message"]
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as official,
            pytest.raises(openai.APIError, match="request_timeout"),
        ):
            list(official.completions.create(model="scripted", prompt="x", stream=True))
        until(lambda: len(script.aborted) == 2)


def test_the_length_of_prompts(script: ScriptedEngine) -> None:
    with live(script, max_prompt_tokens=5) as server, client_of(server) as client:
        response = client.post("/v1/completions", json=ASK | {"prompt": [[1] * 5, [1] * 6]})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "6 tokens" in error["message"] and "max_prompt_tokens=5" in error["message"]
        assert client.post("/v1/completions", json=ASK | {"prompt": [1] * 5}).status_code == 200


def test_a_server_that_is_about_to_stop(script: ScriptedEngine) -> None:
    with live(script) as server, client_of(server) as client:
        server.serving.gate.draining = True
        response = client.post("/v1/completions", json=ASK)
        assert response.status_code == 503
        assert "stopping" in response.json()["error"]["message"]
        assert client.get("/api/live").status_code == 503
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200


def test_a_server_that_is_told_to_stop_as_a_dashboard_opens(
    script: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream has begun: it gets one event, and ends."""

    class Viewer:
        def __init__(self, serving: Serving) -> None:
            serving.gate.draining = True

        async def look(self) -> dict[str, str]:
            return {"seen": "once"}

    monkeypatch.setattr(dashboard, "Viewer", Viewer)
    with live(script) as server, client_of(server) as client:
        response = client.get("/api/live")
        assert (response.status_code, response.text) == (200, 'data: {"seen":"once"}\n\n')


def test_the_gate_counts_down_whatever_happens() -> None:
    gate = Gate(ServerOptions(max_streams=3, max_queue=2))
    with gate.enter(2) as places:
        assert (gate.open, gate.waiting) == (2, 2)
        with pytest.raises(ApiError, match="max_queue"), gate.enter(1):
            pass
        places[0].note_token()
        places[0].note_token()
        assert (gate.open, gate.waiting) == (2, 1)
        with pytest.raises(RuntimeError), gate.enter(1):
            raise RuntimeError
        assert (gate.open, gate.waiting) == (2, 1)
    assert (gate.open, gate.waiting) == (0, 0)


def test_the_wait_is_the_time_until_so_many_places_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the mean time between two ends; 1 s at least, a minute at most."""
    now = [100.0]
    monkeypatch.setattr("denim.server.limits.time.monotonic", lambda: now[0])
    gate = Gate(ServerOptions(max_streams=40, max_queue=40))

    def wait(wanted: int) -> int:
        with gate.enter(40), pytest.raises(ApiError) as caught:
            gate.check(wanted)
        assert caught.value.headers is not None
        return int(caught.value.headers["retry-after"])

    def ends_every(seconds: float, count: int) -> None:
        for _ in range(count):
            with gate.enter(1):
                now[0] += seconds

    ends_every(4.0, 100)
    assert wait(2) == 8
    ends_every(4.0, 100)
    assert wait(30) == 60
    ends_every(0.001, 200)
    assert wait(3) == 1


def test_a_chat_is_refused_before_its_prompt_is_read(
    script: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long conversation takes time, and nobody would wait for it."""
    monkeypatch.setattr(ScriptedEngine, "read_chat", None)
    with live(script, max_streams=1) as server, client_of(server) as client:
        body = {"messages": [{"role": "user", "content": "x"}], "n": 2}
        assert client.post("/v1/chat/completions", json=body).status_code == 400
