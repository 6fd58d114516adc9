"""A client that asks and does not read."""

from __future__ import annotations

import json
import socket
from typing import Any


def slow_reader(url: str, body: dict[str, Any]) -> socket.socket:
    """A connection whose client asks, and then reads nothing."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    content = json.dumps(body).encode()
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(content), content)
    )
    return connection
