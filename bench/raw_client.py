"""A client that costs next to nothing: many streams over plain sockets in one loop.

It sends requests and reads until they are answered; what came is looked at afterwards. So the time on its
core is the server's.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

END = b"0\r\n\r\n"  # the last chunk of a chunked body
PIECE = 256 * 1024


class Streamed(NamedTuple):
    """Seconds from the first request to the end of the last answer, and the answers as they came."""

    seconds: float
    answers: list[bytes]


def request(path: str, body: dict[str, Any], host: str = "127.0.0.1") -> bytes:
    """A POST of JSON; the connection is kept."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


def stream_all(address: tuple[str, int], requests: Sequence[bytes]) -> Streamed:
    """Send all requests at once, each on a connection of its own, and read all chunked answers."""
    selector = selectors.DefaultSelector()
    answers = [bytearray() for _ in requests]
    sockets = [socket.create_connection(address) for _ in requests]
    try:
        begin = time.perf_counter()
        for place, (one, content) in enumerate(zip(sockets, requests, strict=True)):
            one.sendall(content)
            one.setblocking(False)
            selector.register(one, selectors.EVENT_READ, place)
        while selector.get_map():
            for key, _ in selector.select():
                answer = answers[key.data]
                piece = sockets[key.data].recv(PIECE)
                answer += piece
                if not piece or answer.endswith(END):
                    selector.unregister(key.fileobj)
        return Streamed(time.perf_counter() - begin, [bytes(answer) for answer in answers])
    finally:
        for one in sockets:
            one.close()


def events(answer: bytes) -> list[dict[str, Any]]:
    """The JSON of every server-sent event of an answer. Raises ValueError for what is no such answer."""
    status, _, rest = answer.partition(b"\r\n")
    if b" 200 " not in status:
        raise ValueError(f"the server answered {answer[:500]!r}")
    _, _, chunks = rest.partition(b"\r\n\r\n")
    body = b""
    while chunks:
        size, _, chunks = chunks.partition(b"\r\n")
        body += chunks[: int(size, 16)]
        chunks = chunks[int(size, 16) + 2 :]
    data = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(one) for one in data if one != b"[DONE]"]
