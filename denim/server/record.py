"""What is known of one HTTP request while it is served: for its log line, the metrics and the time-outs.

Owns request ids and trace headers. Filled in by whoever learns something; read when the request ends.
"""

from __future__ import annotations

import re
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import Scope

from denim.server.options import ServerOptions

KEY = "denim.record"  # in an ASGI scope
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
# https://www.w3.org/TR/trace-context/#traceparent-header
TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}.*")


@dataclass
class RequestRecord:
    """Times by `time.monotonic`. `status` 0: no answer yet. `sending_since`: when the piece that the client
    has not taken yet was given to it."""

    request_id: str
    method: str
    path: str
    trace_id: str | None = None
    trace_headers: list[tuple[str, str]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    model: str | None = None
    streamed: bool = False
    prompts: int = 0
    first_token: float | None = None
    sending_since: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    error: str | None = None

    @classmethod
    def of(cls, scope: Scope) -> RequestRecord:
        """Of a request that arrives now. An id and a trace that it brings are kept if well formed."""
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        record = cls(request_id, scope["method"], scope["path"])
        trace = TRACEPARENT.fullmatch(headers.get("traceparent", ""))
        if trace:
            record.trace_id = trace[1]
            names = ("traceparent", "tracestate")
            record.trace_headers = [(name, headers[name]) for name in names if name in headers]
        return record

    def deadline(self, options: ServerOptions) -> tuple[float, str] | None:
        """The next time-out, and the option that set it."""
        limits = [(options.request_timeout, self.started, "request_timeout")]
        if self.first_token is None:
            limits.append((options.first_token_timeout, self.started, "first_token_timeout"))
        if self.sending_since is not None:
            limits.append((options.write_timeout, self.sending_since, "write_timeout"))
        return min(
            ((start + limit, name) for limit, start, name in limits if limit is not None), default=None
        )


def record_of(request: Request) -> RequestRecord:
    record = request.scope[KEY]
    assert isinstance(record, RequestRecord)
    return record
