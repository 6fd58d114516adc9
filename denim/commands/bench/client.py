"""One streamed request to a server that speaks the OpenAI API, and what its client sees of it.

Owns the request's body and the reading of the answer's pieces. A server may send one token a piece or many,
may name its usage in every piece, in the last one, or nowhere.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from denim.commands.bench.event_lines import event_data

Message = Mapping[str, str]

LONGEST_ERROR = 300  # characters of a server's words


@dataclass(frozen=True)
class Api:
    """Where to ask, and how. `base_url` ends in /v1. `chat`: /chat/completions; else /completions. `extras`
    go into every body beside the standard fields, or in their place."""

    base_url: str
    model: str
    chat: bool = True
    key: str | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)

    def body(self, messages: Sequence[Message], max_tokens: int) -> dict[str, Any]:
        asked: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max_tokens,
            "stream": True,
            "temperature": 0,
        }
        if self.chat:
            asked["messages"] = list(messages)
        else:
            asked["prompt"] = "\n\n".join(message["content"] for message in messages)
        return {**asked, **self.extras}


def headers_of(key: str | None) -> dict[str, str]:
    """What a server that wants a key is shown."""
    return {} if key is None else {"authorization": f"Bearer {key}"}


@dataclass
class Measured:
    """One request. Times are seconds of the run's clock; `pieces` are those that brought text or tokens.

    piece_tokens: tokens of each piece, where the server says so. Counts are None where it names none.
    """

    session: int
    turn: int
    sent: float
    pieces: list[float] = field(default_factory=list)
    piece_tokens: list[int] = field(default_factory=list)
    ended: float = 0.0
    text: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None


async def ask(
    client: httpx.AsyncClient,
    api: Api,
    messages: Sequence[Message],
    max_tokens: int,
    begun: float,
    session: int = 0,
    turn: int = 0,
) -> Measured:
    """Send one request and read its answer to the end. What goes wrong is in `error`. `begun`: the run's
    start by `time.perf_counter`."""
    measured = Measured(session, turn, time.perf_counter() - begun)
    try:
        await _stream(client, api, api.body(messages, max_tokens), measured, begun)
        if measured.error is None and not measured.pieces:
            measured.error = "an answer without any text"
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        measured.error = f"{type(error).__name__}: {error}"[:LONGEST_ERROR]
    measured.ended = time.perf_counter() - begun
    return measured


async def _stream(
    client: httpx.AsyncClient, api: Api, body: dict[str, Any], measured: Measured, begun: float
) -> None:
    """Raises httpx.HTTPError, and ValueError for what is no JSON."""
    path = "chat/completions" if api.chat else "completions"
    async with client.stream(
        "POST", f"{api.base_url}/{path}", json=body, headers=headers_of(api.key)
    ) as reply:
        if reply.status_code != httpx.codes.OK:
            told = (await reply.aread()).decode("utf-8", "replace")
            measured.error = f"status {reply.status_code}: {_words(told)}"
            return
        async for data in event_data(reply.aiter_bytes()):
            if data == "[DONE]":
                return
            chunk = json.loads(data)
            if not isinstance(chunk, dict):
                raise ValueError(f"a piece that is no object: {data}")
            _take(chunk, measured, time.perf_counter() - begun)


def _take(chunk: dict[str, Any], measured: Measured, now: float) -> None:
    if "error" in chunk:
        measured.error = _words(json.dumps(chunk["error"]))
        return
    before = measured.output_tokens or 0
    if usage := chunk.get("usage"):
        measured.prompt_tokens = usage.get("prompt_tokens")
        measured.output_tokens = usage.get("completion_tokens")
        measured.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        said = choice.get("text") or delta.get("content") or ""
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        measured.text += said
        if said or thought or delta.get("tool_calls"):
            measured.pieces.append(now)
            measured.piece_tokens.append((measured.output_tokens or 0) - before)
        measured.finish_reason = choice.get("finish_reason") or measured.finish_reason


def _words(told: str) -> str:
    """A server's error in its own words."""
    try:
        error = json.loads(told)
        error = error.get("error", error)
        told = error.get("message", told) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        pass
    return told[:LONGEST_ERROR]
