"""What tests of chats by the official client share: a short chat, and its stream put together."""

from __future__ import annotations

from typing import Any

import openai
from openai.types.chat import ChatCompletionChunk

HELLO = [{"role": "user", "content": "hello"}]
SHORT = {"model": "denim-tiny", "messages": HELLO, "max_tokens": 24, "temperature": 0}
SILENT = {"chat_template_kwargs": {"enable_thinking": False}}


def chunks_of(client: openai.OpenAI, **body: Any) -> list[ChatCompletionChunk]:
    return list(client.chat.completions.create(stream=True, **body))


def text_of(chunks: list[ChatCompletionChunk], index: int = 0, field: str = "content") -> str:
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(getattr(delta, field, None) or "" for delta in deltas)
