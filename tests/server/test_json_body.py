"""Bodies that are no JSON, or not only one thing: refused with a reason, on every endpoint that takes one."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from denim.server import json_body
from denim.server.errors import ApiError
from denim.server.json_body import DEEPEST, parse_json
from tests.server.live import Live, live

JSON = {"content-type": "application/json"}
ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
)
BAD: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "Missing: the request's body"),
    "broken": (b'{"prompt": ', "line 1, column 12"),
    "a string that does not end": (b'{"prompt": "x', "Unterminated string"),
    "two values": (b"{} {}", "Extra data"),
    "not UTF-8": (b'{"prompt": "\xff"}', "not UTF-8 at byte 12"),
    "a byte order mark": (b"\xef\xbb\xbf{}", "UTF-8 BOM"),
    "a control character": (b'{"prompt": "\x00"}', "Invalid control character"),
    "half a surrogate pair": (rb'{"prompt": "a\ud83d"}', "half of a surrogate pair"),
    "the other half": (rb'{"messages": [{"role": "user", "content": "\udc00"}]}', "surrogate"),
    "half a pair in a key": (rb'{"\ud800": 1}', "a key holds half"),
    "a key twice": (b'{"prompt": "a", "prompt": "b"}', "the key 'prompt' comes twice"),
    "a key twice, deep down": (b'{"metadata": {"a": {"b": 1, "b": 2}}}', "the key 'b' comes twice"),
    "NaN": (b'{"temperature": NaN}', "NaN is no JSON number"),
    "infinity": (b'{"temperature": -Infinity}', "-Infinity is no JSON number"),
    "a huge float": (b'{"temperature": 1e999}', "1e999 is too large"),
    "a huge integer": (b'{"seed": ' + b"9" * 5000 + b"}", "thousands of digits"),
    "deep lists": (b'{"stop": ' + b"[" * 300 + b"]" * 300 + b"}", f"deeper than {DEEPEST}"),
    "very deep lists": (b"[" * 100_000, "deeper"),
    "deep objects": (b'{"a":' * 200 + b"1" + b"}" * 200, f"deeper than {DEEPEST}"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_bodies(http: httpx.Client, name: str) -> None:
    body, reason = BAD[name]
    for endpoint in ENDPOINTS:
        response = http.post(endpoint, content=body, headers=JSON)
        assert response.status_code == 400, (endpoint, response.text)
        assert reason in response.json()["error"]["message"], endpoint


@pytest.mark.parametrize("value", ["[]", '"x"', "7", "null", "true", "[{}]"])
def test_bodies_that_are_no_object(http: httpx.Client, value: str) -> None:
    for endpoint in ENDPOINTS:
        response = http.post(endpoint, content=value, headers=JSON)
        assert response.status_code == 400, endpoint
        assert response.json()["error"]["message"], endpoint


def test_a_broken_field_is_named(http: httpx.Client) -> None:
    body = rb'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]}'
    error = http.post("/v1/chat/completions", content=body, headers=JSON).json()["error"]
    assert (error["param"], error["code"]) == ("messages.0.content.0.text", "invalid_json")


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "", "jsonx", "multipart/form-data"]
)
def test_other_types_of_content(http: httpx.Client, kind: str) -> None:
    for endpoint in ENDPOINTS:
        response = http.post(endpoint, content=b"{}", headers={"content-type": kind})
        assert response.status_code == 415, endpoint
        assert "application/json" in response.json()["error"]["message"]


def test_json_with_parameters_and_suffix_is_json(http: httpx.Client) -> None:
    for kind in ("application/json; charset=utf-8", "Application/JSON", "application/problem+json"):
        response = http.post("/tokenize", content=b'{"prompt": "x"}', headers={"content-type": kind})
        assert response.status_code == 200


def test_whole_surrogate_pairs_are_characters() -> None:
    assert parse_json(rb'{"a": "\ud83d\ude00"}') == {"a": "😀"}


def test_what_is_allowed() -> None:
    value = {"a": [1, -2.5e3, None, True, {"b": "ü \\ud83d"}], "": "\u2028"}
    assert parse_json(json.dumps(value).encode()) == value
    assert parse_json(b"[" * (DEEPEST - 1) + b"]" * (DEEPEST - 1)) is not None
    with pytest.raises(ApiError, match="deeper"):
        parse_json(b"[" * (DEEPEST + 1) + b"1" + b"]" * (DEEPEST + 1))


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"[" + b"1," * (2**21 + 1) + b"1]", "more than 2,097,152 values"),
        (b"[" + b'"a",' * 100_001 + b"1]", "more than 100,000 values beside numbers in lists"),
        (json.dumps({str(i): i for i in range(10_001)}).encode(), "more than 10,000 keys in one object"),
        (json.dumps([{str(i): i for i in range(9_999)}] * 11).encode(), "more than 100,000"),
        (b"[" + b"[[]]," * 50_001 + b"1]", "more than 100,000"),
    ],
    ids=["numbers", "strings", "keys", "objects", "lists"],
)
def test_more_values_than_anybody_has_use_for(body: bytes, told: str) -> None:
    """All clients wait while they are read."""
    with pytest.raises(ApiError, match=told) as caught:
        parse_json(body)
    assert caught.value.status_code == 413


def test_others_go_on_while_a_long_body_is_read(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def read(body: bytes) -> Any:
        threads.append(threading.current_thread())
        return parse_json(body)

    monkeypatch.setattr(json_body, "parse_json", read)
    for length in (10, 2**17, 10):
        http.post("/tokenize", json={"prompt": "x" * length})
    loop, beside, again = threads
    assert loop is again is not beside


def test_as_many_values_as_there_is_use_for() -> None:
    assert len(parse_json(b"[" + b"1," * 1_100_000 + b"1]")) == 1_100_001
    text = ", ".join(["word"] * 200_000)
    assert parse_json(json.dumps({"prompt": text}).encode()) == {"prompt": text}


def test_a_long_list_of_tokens_is_read_quickly() -> None:
    """In a few times what Python's own reader takes; a look at the path of each would take far longer."""
    body = json.dumps({"prompt": list(range(500_000))}).encode()
    assert seconds(parse_json, body) < 20 * seconds(json.loads, body)


def seconds(read: Callable[[bytes], Any], body: bytes) -> float:
    """Of this thread's processor, at best."""
    times = []
    for _ in range(3):
        start = time.thread_time()
        read(body)
        times.append(time.thread_time() - start)
    return min(times)


def test_a_body_that_is_too_large(server: Live) -> None:
    with live(server.serving.engine, max_body="10kB") as small, httpx.Client(base_url=small.url) as http:
        response = http.post("/tokenize", json={"prompt": "x" * 20_000})
        assert response.status_code == 413
        assert "max_body of 9.77 KiB" in response.json()["error"]["message"]
        assert response.json()["error"]["param"] == "max_body"

        def pieces() -> Any:  # without a Content-Length
            for _ in range(30):
                yield b"x" * 1000

        response = http.post("/tokenize", content=pieces(), headers=JSON)
        assert response.status_code == 413
        frame = b'{"prompt": "%s"}'
        for size, status in ((10_000, 200), (10_001, 413)):
            body = frame % (b"x" * (size - len(frame) + 2))
            for content in (body, iter([body[:5000], body[5000:]])):
                assert http.post("/tokenize", content=content, headers=JSON).status_code == status
        assert http.post("/tokenize", json={"prompt": "x" * 5000}).status_code == 200


def test_a_body_that_is_too_slow(server: Live) -> None:
    with live(server.serving.engine, body_timeout=0.3) as hasty:
        host, port = hasty.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(
                b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: 100\r\n\r\n{"
            )
            answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 408")


def test_a_header_that_is_no_number_of_bytes(server: Live) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n{}")
        assert connection.recv(4096).startswith(b"HTTP/1.1 400")
