"""`/v1/chat/completions`: the answer to a conversation.

Owns the way from a body to a conversation, and from replies to choices, whole or in chunks.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from denim.server.attention import attended
from denim.server.base_model import json_response
from denim.server.chat_job import ChatJob, chat_job
from denim.server.chat_schema import (
    ChatAnswer,
    ChatChoice,
    ChatCompletion,
    ChatRequest,
    FunctionCall,
    NamedTool,
    ToolCall,
)
from denim.server.conversation import Conversation, conversation, options_with_effort
from denim.server.generation import generate
from denim.server.json_body import JsonRoute
from denim.server.logprobs import Report
from denim.server.record import RequestRecord, record_of
from denim.server.reply import Call, Reply
from denim.server.reply_form import ToolChoice
from denim.server.reply_parts import AnswerText, ReasoningText, ReplyPart, ToolCallArguments, ToolCallStart
from denim.server.schema import ERRORS, STREAMED, Usage, usage_so_far
from denim.server.serving import Serving, serving_of
from denim.server.streaming import DONE, event, event_stream

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"], responses=ERRORS)


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMED)
async def chat(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    serving, record = serving_of(request), record_of(request)
    model = record.model = serving.model_named(body.model)
    body.check()
    params = body.params()
    job = await chat_job(serving, conversation_of(body), params, body)
    answer = _Answer(serving, record, body, job, f"chatcmpl-{record.request_id}", model)
    if body.stream:
        return await event_stream(request, answer.events())
    return await attended(answer.whole(), request.receive, record, serving.options)


def conversation_of(body: ChatRequest) -> Conversation:
    """Raises ApiError for a message that cannot be rendered."""
    options = options_with_effort(body.chat_template_kwargs, body.reasoning_effort)
    tools = [] if body.tool_choice == "none" else body.tools or []
    named = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
    single = body.parallel_tool_calls is False
    choice = ToolChoice(body.tool_choice == "required", named, single)
    return conversation(body.messages, tools, options, choice)


class _Answer:
    """The answer to one request."""

    def __init__(
        self,
        serving: Serving,
        record: RequestRecord,
        body: ChatRequest,
        job: ChatJob,
        id_: str,
        model: str,
    ) -> None:
        self._serving = serving
        self._record = record
        self._body = body
        self._chat = job
        self._job = job.job
        self._replies = job.replies()
        self._head: dict[str, Any] = {"id": id_, "created": int(time.time()), "model": model}

    async def whole(self) -> Response:
        async with aclosing(generate(self._serving, self._record, self._job)) as deltas:
            async for at, delta in deltas:
                self._replies[at].take(delta)
        choices = [self._choice(reply) for reply in self._replies]
        ids = self._job.prompts[0].tokens if self._body.return_token_ids else None
        return json_response(
            ChatCompletion(**self._head, choices=choices, usage=self._usage(), prompt_token_ids=ids)
        )

    def _choice(self, reply: Reply) -> ChatChoice:
        body = self._body
        return ChatChoice(
            index=reply.index,
            message=ChatAnswer(
                content=reply.answer or (None if reply.calls else ""),
                reasoning_content=reply.reasoning or None,
                tool_calls=[_tool_call(call) for call in reply.calls] or None,
            ),
            logprobs=self._chat.logprobs(reply.reports, body.top_logprobs) if body.logprobs else None,
            finish_reason=reply.finish_reason,  # type: ignore[arg-type]
            stop_reason=reply.stop_reason,
            token_ids=reply.tokens if body.return_token_ids else None,
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Chunks: the role, the parts as they come, the end; then the usage, if it is wanted."""
        options = self._body.stream_options
        begun = set()
        async with aclosing(generate(self._serving, self._record, self._job)) as deltas:
            async for at, delta in deltas:
                reply = self._replies[at]
                parts = reply.take(delta)
                pieces = [_delta_of(part) for part in parts]
                if at not in begun:
                    begun.add(at)
                    pieces.insert(0, {"role": "assistant", "content": ""})
                usage = usage_so_far(options, self._usage)
                for piece in pieces:
                    yield event(self._chunk([self._piece(reply, piece)], usage))
                if reply.finish_reason is not None:
                    last = self._piece(reply, {}, reply.finish_reason)
                    yield event(self._chunk([last], usage))
        if options is not None and options.include_usage:
            yield event(self._chunk([], {"usage": self._usage().model_dump()}))
        yield DONE

    def _piece(self, reply: Reply, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        """A choice of a chunk. Reports and ids of tokens go out with the next chunk that there is."""
        body = self._body
        piece: dict[str, Any] = {"index": reply.index, "delta": delta, "finish_reason": finish_reason}
        silent = "role" in delta
        reports: Sequence[Report] = [] if silent else reply.reports
        piece["logprobs"] = None
        if body.logprobs and reports:
            piece["logprobs"] = self._chat.logprobs(reports, body.top_logprobs).model_dump()
        if finish_reason is not None:
            piece["stop_reason"] = reply.stop_reason
        if body.return_token_ids and not silent:
            piece["token_ids"] = reply.tokens[reply.sent :]
        if not silent:
            reply.sent, reply.reports = len(reply.tokens), []
        return piece

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return self._head | {"object": "chat.completion.chunk", "choices": choices} | usage

    def _usage(self) -> Usage:
        record = self._record
        reasoning = sum(reply.reasoning_tokens for reply in self._replies)
        return Usage.of(record.prompt_tokens, record.completion_tokens, record.cached_tokens, reasoning)


def _tool_call(call: Call) -> ToolCall:
    return ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))


def _delta_of(part: ReplyPart) -> dict[str, Any]:
    if isinstance(part, AnswerText):
        return {"content": part.text}
    if isinstance(part, ReasoningText):
        return {"reasoning_content": part.text}
    if isinstance(part, ToolCallStart):
        function = {"name": part.name, "arguments": ""}
        call = {"index": part.index, "id": part.id, "type": "function", "function": function}
    else:
        assert isinstance(part, ToolCallArguments)
        call = {"index": part.index, "function": {"arguments": part.json_piece}}
    return {"tool_calls": [call]}
