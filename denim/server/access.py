"""Every HTTP request from its first byte to its last: its record, its headers, its line in the log.

Owns the outermost layer of the app. Plain ASGI, so that it costs nothing while an answer streams.
"""

from __future__ import annotations

import asyncio
import logging
import time

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from denim.server.errors import ANTHROPIC_PATH, api_error, error_body
from denim.server.metrics import Metrics
from denim.server.record import KEY, RequestRecord

log = logging.getLogger("denim.server")

UNKNOWN_PATH = "(none)"


class AccessLayer:
    """Gives each request a `RequestRecord`, and takes it down when the request is over."""

    def __init__(self, app: ASGIApp, metrics: Metrics, log_requests: bool) -> None:
        self.app = app
        self._metrics = metrics
        self._log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        record = scope[KEY] = RequestRecord.of(scope)
        extra = [("x-request-id", record.request_id), *record.trace_headers]
        if record.path.startswith(ANTHROPIC_PATH):
            extra.append(("request-id", record.request_id))  # where its clients look
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in extra]

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message = {**message, "headers": [*message["headers"], *headers]}
            await send(message)

        try:
            await self.app(scope, receive, note)
        except (Exception, asyncio.CancelledError) as error:
            # A fault of the server's, or its end: all others were answered further inside.
            began = record.status != 0
            told = api_error(error)
            record.error, record.status = repr(error), told.status_code
            if not began:
                answer = JSONResponse(error_body(told, scope["path"]), told.status_code, told.headers)
                await answer(scope, receive, note)
        finally:
            self._end(record, scope)

    def _end(self, record: RequestRecord, scope: Scope) -> None:
        seconds = time.monotonic() - record.started
        route = scope.get("route")
        self._metrics.note_request(record, getattr(route, "path", UNKNOWN_PATH), seconds)
        if self._log_requests:
            log.info(_line(record, seconds), extra={"fields": _fields(record, seconds)})


def _line(record: RequestRecord, seconds: float) -> str:
    text = f"{record.method} {record.path} {record.status} in {seconds:.3f} s"
    if record.prompts:
        text += (
            f"; {record.prompt_tokens} tokens in ({record.cached_tokens} cached),"
            f" {record.completion_tokens} out"
        )
    return f"{text} [{record.request_id}]" + ("" if record.error is None else f": {record.error}")


def _fields(record: RequestRecord, seconds: float) -> dict[str, object]:
    fields: dict[str, object] = {
        "request_id": record.request_id,
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "seconds": round(seconds, 6),
    }
    if record.trace_id is not None:
        fields["trace_id"] = record.trace_id
    if record.prompts:
        fields |= {
            "model": record.model,
            "stream": record.streamed,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "completion_tokens": record.completion_tokens,
            "finish_reasons": dict(record.finish_reasons),
        }
        if record.first_token is not None:
            fields["seconds_to_first_token"] = round(record.first_token - record.started, 6)
    if record.error is not None:
        fields["error"] = record.error
    return fields
