"""`/v1/messages`: Anthropic's API over the same engine.

Owns the way from replies to content blocks, whole or as the API's events.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from denim.server.attention import attended
from denim.server.base_model import json_response
from denim.server.chat_job import ChatJob, chat_job
from denim.server.generation import generate
from denim.server.json_body import JsonRoute
from denim.server.messages_in import conversation_of
from denim.server.messages_schema import (
    ANTHROPIC_ERRORS,
    MessageFields,
    MessagesRequest,
    MessagesResponse,
    MessagesUsage,
    TextBlock,
    ThinkingBlock,
    TokenCount,
    ToolUseBlock,
)
from denim.server.record import RequestRecord, record_of
from denim.server.reply import Reply, call_arguments
from denim.server.reply_parts import AnswerText, ReasoningText, ReplyPart, ToolCallArguments, ToolCallStart
from denim.server.schema import STREAMED
from denim.server.serving import Serving, serving_of
from denim.server.streaming import event, event_stream
from denim.server.tokens import chat_tokens

router = APIRouter(route_class=JsonRoute, tags=["Anthropic"], responses=ANTHROPIC_ERRORS)

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@router.post("/v1/messages", response_model=MessagesResponse, responses=STREAMED)
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation."""
    serving, record = serving_of(request), record_of(request)
    model = record.model = serving.model_named(body.model)
    body.check()
    job = await chat_job(serving, conversation_of(body), body.params(), body)
    answer = _Answer(serving, record, job, f"msg_{record.request_id}", model)
    if body.stream:
        return await event_stream(request, answer.events(), lambda error: event(error, "error"))
    return await attended(answer.whole(), request.receive, record, serving.options)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: MessageFields, request: Request) -> TokenCount:
    """Tokens of a conversation as the template renders it."""
    serving = serving_of(request)
    serving.model_named(body.model)
    return TokenCount(input_tokens=len(await chat_tokens(serving, conversation_of(body))))


class _Answer:
    """The answer to one request."""

    def __init__(self, serving: Serving, record: RequestRecord, job: ChatJob, id_: str, model: str) -> None:
        self._serving = serving
        self._record = record
        self._job = job.job
        self._reply = job.replies()[0]
        self._id = id_
        self._model = model

    async def whole(self) -> Response:
        async with aclosing(generate(self._serving, self._record, self._job)) as deltas:
            async for _, delta in deltas:
                self._reply.take(delta)
        return json_response(self._message(_blocks(self._reply)))

    def _message(self, content: list[TextBlock | ThinkingBlock | ToolUseBlock]) -> MessagesResponse:
        reason, sequence = self._stop()
        return MessagesResponse(
            id=self._id,
            model=self._model,
            content=content,
            stop_reason=reason,  # type: ignore[arg-type]
            stop_sequence=sequence,
            usage=self._usage(),
        )

    def _stop(self) -> tuple[str | None, str | None]:
        """Why the reply ended, in the API's words, and the stop sequence that ended it."""
        reply = self._reply
        if reply.finish_reason is None:
            return None, None
        if reply.finish_reason == "stop" and isinstance(reply.stop_reason, str):
            return "stop_sequence", reply.stop_reason
        return STOP_REASONS[reply.finish_reason], None

    def _usage(self) -> MessagesUsage:
        record = self._record
        return MessagesUsage(
            input_tokens=record.prompt_tokens - record.cached_tokens,
            cache_read_input_tokens=record.cached_tokens,
            output_tokens=record.completion_tokens,
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The message without content, its blocks one after the other, why it ended."""
        blocks = _BlockEvents()
        begun = False
        async with aclosing(generate(self._serving, self._record, self._job)) as deltas:
            async for _, delta in deltas:
                parts = self._reply.take(delta)
                if not begun:
                    begun = True
                    yield _event("message_start", message=self._opening())
                for piece in blocks.of(parts):
                    yield piece
        for piece in blocks.end():
            yield piece
        reason, sequence = self._stop()
        stop = {"stop_reason": reason, "stop_sequence": sequence}
        yield _event("message_delta", delta=stop, usage=self._usage().model_dump())
        yield _event("message_stop")

    def _opening(self) -> dict[str, Any]:
        """The message as it is before anything of it has come."""
        message = self._message([]).model_dump()
        message["usage"]["output_tokens"] = 0
        return message | {"stop_reason": None, "stop_sequence": None}


class _BlockEvents:
    """The events of content blocks: each opens when its first part comes and closes when another does."""

    def __init__(self) -> None:
        self._index = -1
        self._open: type[ReplyPart] | None = None

    def of(self, parts: Sequence[ReplyPart]) -> list[bytes]:
        events: list[bytes] = []
        for part in parts:
            if isinstance(part, AnswerText):
                events += self._in(AnswerText, {"type": "text", "text": ""})
                events.append(self._delta({"type": "text_delta", "text": part.text}))
            elif isinstance(part, ReasoningText):
                events += self._in(ReasoningText, {"type": "thinking", "thinking": "", "signature": ""})
                events.append(self._delta({"type": "thinking_delta", "thinking": part.text}))
            elif isinstance(part, ToolCallStart):
                block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
                events += [*self.end(), *self._in(ToolCallStart, block)]
            else:
                assert isinstance(part, ToolCallArguments)
                events.append(self._delta({"type": "input_json_delta", "partial_json": part.json_piece}))
        return events

    def _in(self, kind: type[ReplyPart], block: dict[str, Any]) -> list[bytes]:
        """Be in a block of this kind: open one unless the last one is."""
        if self._open is kind:
            return []
        closed = self.end()
        self._index += 1
        self._open = kind
        return [*closed, _event("content_block_start", index=self._index, content_block=block)]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def end(self) -> list[bytes]:
        """Close the block that is open, if one is."""
        if self._open is None:
            return []
        self._open = None
        return [_event("content_block_stop", index=self._index)]


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind} | fields, kind)


def _blocks(reply: Reply) -> list[TextBlock | ThinkingBlock | ToolUseBlock]:
    """The blocks of a whole reply."""
    blocks: list[TextBlock | ThinkingBlock | ToolUseBlock] = []
    if reply.reasoning:
        blocks.append(ThinkingBlock(thinking=reply.reasoning))
    if reply.answer:
        blocks.append(TextBlock(text=reply.answer))
    return blocks + [
        ToolUseBlock(id=call.id, name=call.name, input=call_arguments(call)) for call in reply.calls
    ]
