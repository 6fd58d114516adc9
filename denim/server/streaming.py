"""Answers that come in pieces: server-sent events.

Owns the form of an event and the way of the events to the client: the first one decides the status, an error
after it is an event itself. Knows nothing of what is in an event.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from denim.server.attention import attended
from denim.server.errors import CLIENT_GONE, ApiError, api_error, error_body
from denim.server.options import ServerOptions
from denim.server.record import RequestRecord, record_of
from denim.server.serving import serving_of

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx must not collect the events
}
DONE = b"data: [DONE]\n\n"

encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

Events = AsyncGenerator[bytes, None]
ErrorEvent = Callable[[dict[str, Any]], bytes]


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """One event with JSON in it, and a name where the API has named events."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {encode(data)}\n\n".encode()


def error_then_done(body: dict[str, Any]) -> bytes:
    """How a stream of the OpenAI API ends when something failed."""
    return event(body) + DONE


async def event_stream(
    request: Request, events: Events, error_event: ErrorEvent = error_then_done
) -> EventStream:
    """The response that sends `events`, once the first one is there. What goes wrong before is raised, so
    that the client gets a status; what goes wrong later is told by `error_event` of the error's body."""
    record, options = record_of(request), serving_of(request).options
    try:
        first = await attended(_next(events), request.receive, record, options)
    except BaseException:
        await events.aclose()
        raise
    record.streamed = True
    return EventStream(first, events, record, options, error_event)


class EventStream(Response):
    """Sends `first` and then `events`, each as soon as it is there."""

    def __init__(
        self,
        first: bytes,
        events: Events,
        record: RequestRecord,
        options: ServerOptions,
        error_event: ErrorEvent,
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._record = record
        self._options = options
        self._error_event = error_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = self._record
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await attended(self._pump(send), receive, record, self._options)
        except ApiError as error:
            record.error, record.status = error.message, error.status_code
            if error.status_code == CLIENT_GONE or record.sending_since is not None:
                return  # nobody reads any more
            body = self._error_event(error_body(error, scope["path"]))
            await send({"type": "http.response.body", "body": body, "more_body": True})
        finally:
            await self._events.aclose()
        await send({"type": "http.response.body", "body": b""})

    async def _pump(self, send: Send) -> None:
        """Raises ApiError for whatever went wrong."""
        record, piece = self._record, self._first
        try:
            while True:
                record.sending_since = time.monotonic()
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                record.sending_since = None
                piece = await anext(self._events)
        except StopAsyncIteration:
            return
        except Exception as error:
            raise api_error(error) from error


async def _next(events: Events) -> bytes:
    return await anext(events)
