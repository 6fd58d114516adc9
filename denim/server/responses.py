"""`/v1/responses`: the OpenAI API's newer way to an answer. Nothing is stored between requests.

Owns the way from a body to a job, and from output items to a response, whole or as the API's events.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi import Response as HttpResponse

from denim.engine.outputs import StreamDelta
from denim.server.attention import attended
from denim.server.base_model import json_response
from denim.server.chat_job import ChatJob, chat_job
from denim.server.generation import generate
from denim.server.json_body import JsonRoute
from denim.server.record import RequestRecord, record_of
from denim.server.responses_in import conversation_of
from denim.server.responses_out import Event, OutputItems
from denim.server.responses_schema import (
    Incomplete,
    InputDetails,
    OutputDetails,
    Reasoning,
    Response,
    ResponsesRequest,
    ResponsesUsage,
    TextOptions,
)
from denim.server.schema import ERRORS, STREAMED
from denim.server.serving import Serving, serving_of
from denim.server.streaming import event, event_stream

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"], responses=ERRORS)


@router.post("/v1/responses", response_model=Response, responses=STREAMED)
async def respond(body: ResponsesRequest, request: Request) -> HttpResponse:
    """Answer input."""
    serving, record = serving_of(request), record_of(request)
    model = record.model = serving.model_named(body.model)
    body.check()
    job = await chat_job(serving, conversation_of(body), body.params(), body)
    answer = _Answer(serving, record, body, job, model)
    if body.stream:
        return await event_stream(request, answer.events(), answer.failed)
    return await attended(answer.whole(), request.receive, record, serving.options)


class _Answer:
    """The answer to one request."""

    def __init__(
        self, serving: Serving, record: RequestRecord, body: ResponsesRequest, job: ChatJob, model: str
    ) -> None:
        self._serving = serving
        self._record = record
        self._body = body
        self._job = job.job
        self._reply = job.replies()[0]
        told = partial(job.logprobs, top=body.top_logprobs) if body.wants_logprobs else None
        self._items = OutputItems(told)
        self._model = model
        self._created = int(time.time())
        self._events = 0

    async def whole(self) -> HttpResponse:
        async with aclosing(generate(self._serving, self._record, self._job)) as deltas:
            async for _, delta in deltas:
                self._take(delta)
        self._items.close(self._status())
        return json_response(self._response(self._status()))

    def _take(self, delta: StreamDelta) -> list[Event]:
        parts = self._reply.take(delta)
        reports, self._reply.reports = self._reply.reports, []
        return self._items.take(parts, reports)

    def _status(self) -> str:
        return "incomplete" if self._reply.finish_reason == "length" else "completed"

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The response as it begins, its items one after the other, the whole response."""
        begun = False
        async with aclosing(generate(self._serving, self._record, self._job)) as deltas:
            async for _, delta in deltas:
                events = self._take(delta)
                if not begun:
                    begun = True
                    for name in ("created", "in_progress"):
                        opening = self._response("in_progress", empty=True).model_dump()
                        yield self._numbered({"type": f"response.{name}", "response": opening})
                for data in events:
                    yield self._numbered(data)
        status = self._status()
        for data in self._items.close(status):
            yield self._numbered(data)
        response = self._response(status).model_dump()
        yield self._numbered({"type": f"response.{status}", "response": response})

    def _numbered(self, data: Event) -> bytes:
        number, self._events = self._events, self._events + 1
        return event(data | {"sequence_number": number}, data["type"])

    def failed(self, body: dict[str, Any]) -> bytes:
        """How a stream ends when something failed."""
        error = body["error"]
        told = {"code": error["code"] or error["type"], "message": error["message"]}
        response = self._response("failed").model_dump() | {"error": told}
        ended = self._numbered({"type": "response.failed", "response": response})
        return ended + self._numbered({"type": "error", "param": error["param"]} | told)

    def _response(self, status: str, empty: bool = False) -> Response:
        body, record = self._body, self._record
        usage = ResponsesUsage(
            input_tokens=record.prompt_tokens,
            input_tokens_details=InputDetails(cached_tokens=record.cached_tokens),
            output_tokens=record.completion_tokens,
            output_tokens_details=OutputDetails(reasoning_tokens=self._reply.reasoning_tokens),
            total_tokens=record.prompt_tokens + record.completion_tokens,
        )
        return Response(
            id=f"resp_{record.request_id}",
            created_at=self._created,
            completed_at=int(time.time()) if status == "completed" else None,
            status=status,  # type: ignore[arg-type]
            incomplete_details=Incomplete(reason="max_output_tokens") if status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=self._model,
            output=[] if empty else self._items.items,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning=body.reasoning or Reasoning(),
            temperature=body.temperature,
            text=body.text or TextOptions(),
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_p=body.top_p,
            usage=None if empty else usage,
        )
