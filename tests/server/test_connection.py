"""Heads of requests that do not end: in size and in time."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from denim.server import connection
from denim.server.connection import HEAD_BYTES
from tests.server.live import Live, live
from tests.server.scripted import ScriptedEngine

SOON = 0.3  # seconds
GET = b"GET /version HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(ScriptedEngine(tmp_path_factory.mktemp("words"), "some words")) as server:
        yield server


def connect(served: Live) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def is_cut(client: socket.socket) -> bool:
    """Whether the server closes, within the socket's patience."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "start", [b"", b"\r\n", GET, GET + b"X-A: b"], ids=["silent", "blank", "line", "half"]
)
def test_a_head_that_does_not_come(served: Live, monkeypatch: pytest.MonkeyPatch, start: bytes) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", SOON)
    with connect(served) as client:
        client.sendall(start)
        assert is_cut(client)


def test_a_second_head_that_does_not_come(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", SOON)
    with connect(served) as client:
        client.sendall(GET + b"\r\n")
        answer = client.recv(4096)
        while not answer.endswith(b"}"):  # head and body are sent one after the other
            answer += client.recv(4096)
        assert b"200 OK" in answer
        client.sendall(GET)
        assert is_cut(client)


def test_a_body_has_its_own_time(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", SOON)
    body = b'{"tokens": [5]}'
    head = b"POST /detokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with connect(served) as client:
        client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body))
        time.sleep(2 * SOON)
        client.sendall(body)
        assert client.recv(4096).startswith(b"HTTP/1.1 ")


@pytest.mark.parametrize(
    "start",
    [
        GET + b"X-A: ",
        b"POST /version HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX-A: ",
    ],
    ids=["header", "trailer"],
)
def test_a_header_without_end(served: Live, start: bytes) -> None:
    with connect(served) as client:
        client.sendall(start)
        sent = 0
        with pytest.raises(OSError):
            while sent < 1000 * HEAD_BYTES:
                client.sendall(b"a" * HEAD_BYTES)
                sent += HEAD_BYTES


def test_long_heads_and_bodies_are_served(served: Live) -> None:
    """Below the limit, and a body of many times it in tiny chunks: framing is no head."""
    with connect(served) as client:
        client.sendall(GET + b"X-A: " + b"a" * (HEAD_BYTES // 2) + b"\r\n\r\n")
        assert b"200 OK" in client.recv(4096)
    with connect(served) as client:
        client.sendall(
            b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        client.sendall(b"1\r\n \r\n" * (HEAD_BYTES // 2) + b"2\r\n{}\r\n0\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 400")  # it was read: a prompt is missing
