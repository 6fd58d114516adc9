"""A server of the OpenAI API that chunks as it is told, and counts a word as a token.

It is what `denim bench serve` must also get along with: several tokens a piece, CRLF, comments, pieces of the
network that end inside a character, no usage, fields that it does not know.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.listening import listening


@dataclass
class Manner:
    """per_piece: tokens of a piece. pause: seconds before each. usage: "each", "last", or "none". refused:
    fields that give status 400. wire: bytes of a piece of the network; 0: as it comes. crlf: how lines end.
    fail_after: pieces before an error event, which says `words`. seen: the bodies that came."""

    per_piece: int = 1
    pause: float = 0.0
    usage: str = "last"
    refused: tuple[str, ...] = ()
    wire: int = 0
    crlf: bool = False
    done: bool = True
    fail_after: int | None = None
    words: str = "the engine died"
    seen: list[dict[str, Any]] = field(default_factory=list)


def application(manner: Manner) -> Starlette:
    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "fake", "object": "model"}]})

    async def complete(request: Request) -> Response:
        body = await request.json()
        for name in manner.refused:
            if name in body or name in body.get("stream_options", {}):
                return JSONResponse({"error": {"message": f"unknown field {name}", "param": name}}, 400)
        manner.seen.append(body)
        chat = "messages" in body
        return StreamingResponse(_wire(_events(manner, body, chat), manner), media_type="text/event-stream")

    routes = [
        Route("/v1/models", models),
        Route("/v1/chat/completions", complete, methods=["POST"]),
        Route("/v1/completions", complete, methods=["POST"]),
    ]
    return Starlette(routes=routes)


async def _events(manner: Manner, body: dict[str, Any], chat: bool) -> AsyncIterator[str]:
    said = [m["content"] for m in body["messages"]] if chat else [body["prompt"]]
    prompt = 5 + sum(len(text.split()) for text in said)
    tokens = body["max_tokens"]
    end = "\r\n" if manner.crlf else "\n"

    def event(chunk: dict[str, Any]) -> str:
        return f"data:{'' if manner.crlf else ' '}{json.dumps(chunk, ensure_ascii=False)}{end}{end}"

    def usage(done: int) -> dict[str, Any]:
        return {"prompt_tokens": prompt, "completion_tokens": done, "total_tokens": prompt + done}

    yield f": welcome{end}{end}"
    if chat:
        yield event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    for number, start in enumerate(range(0, tokens, manner.per_piece)):
        await asyncio.sleep(manner.pause)
        if number == manner.fail_after:
            yield event({"error": {"message": manner.words, "code": 500}})
            return
        done = min(tokens, start + manner.per_piece)
        text = "é\u2028 " * (done - start)
        choice = {"index": 0, "delta": {"content": text}} if chat else {"index": 0, "text": text}
        chunk: dict[str, Any] = {"choices": [choice]}
        if manner.usage == "each":
            chunk["usage"] = usage(done)
        yield event(chunk)
    last: dict[str, Any] = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    yield event(last)
    if manner.usage != "none":
        yield event({"choices": [], "usage": usage(tokens)})
    if manner.done:
        yield f"data: [DONE]{end}{end}"


async def _wire(events: AsyncIterator[str], manner: Manner) -> AsyncIterator[bytes]:
    async for text in events:
        data = text.encode()
        for at in range(0, len(data), manner.wire or len(data)):
            yield data[at : at + (manner.wire or len(data))]


def fake_server(manner: Manner) -> AbstractContextManager[str]:
    """Its address."""
    return listening(application(manner))
