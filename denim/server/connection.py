"""A client's connection: uvicorn's, with a limit on the head of a request in size and in time.

Owns both limits. uvicorn has neither: a connection that says nothing would stay open for ever, and a header
without end would be collected, in time that grows with the square of its length. Bodies have limits of their
own (`json_body`).
"""

from __future__ import annotations

from asyncio import TimerHandle
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_SECONDS = 30.0
"""For a head to arrive: what comes before a body."""
HEAD_BYTES = 64 * 1024
"""Of a head; one that comes in a single piece may be longer by that piece."""


class Connection(HttpToolsProtocol):
    """One connection, on the server's event loop."""

    _unused = 0  # bytes that came and made no body and no whole request: (a part of) a head, or trailers
    _timer: TimerHandle | None = None  # runs while a head is awaited

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()
        self._unused += len(data)
        super().data_received(data)
        if self._unused > HEAD_BYTES and not self.transport.is_closing():
            self.logger.warning("A head of more than %d bytes was cut off.", HEAD_BYTES)
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._unused = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unused = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unused = 0
        super().on_message_complete()

    def _await_head(self) -> None:
        self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
