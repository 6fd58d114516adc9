"""`/tokenize` and `/detokenize`: text to token ids and back, as vLLM has them.

Owns the counting too: what is counted need not fit into the context, and nobody is asked to answer it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from denim.engine.changing_lines import ChangingLines
from denim.engine.tokenizer import Tokenizer, need_tokenizer
from denim.errors import RequestError
from denim.server.base_model import ApiModel, Items, json_response
from denim.server.chat_schema import ChatMessage, Tool
from denim.server.conversation import Conversation, conversation
from denim.server.json_body import JsonRoute
from denim.server.schema import ERRORS
from denim.server.serving import Serving, serving_of

LONGEST_TEXT = 2**22
"""Characters that are tokenised at once: a second's work."""

router = APIRouter(route_class=JsonRoute, tags=["tokens"], responses=ERRORS)


class TokenizeRequest(ApiModel):
    """A text, or a conversation by the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[ChatMessage] | None = Field(default=None, min_length=1)
    tools: Items[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = Field(default=None, description="Of a text; default: true.")
    return_token_strs: bool | None = None


class Tokens(ApiModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(ApiModel):
    model: str | None = None
    tokens: Items[int]
    skip_special_tokens: bool | None = Field(default=None, description="Default: false.")


class Text(ApiModel):
    prompt: str


@router.post("/tokenize", response_model=Tokens)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Token ids of a text or of a conversation."""
    serving = serving_of(request)
    serving.model_named(body.model)
    tokenizer = need_tokenizer(serving.engine.tokenizer, "A text prompt")
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", "prompt")
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        tokens = await asyncio.to_thread(_encoded, tokenizer, body.prompt, special, "prompt")
    else:
        chat = conversation(body.messages or [], body.tools or [], body.chat_template_kwargs or {})
        tokens = await chat_tokens(serving, chat)
    texts = None
    if body.return_token_strs:
        texts = await asyncio.to_thread(lambda: [tokenizer.decode_one(token) for token in tokens])
    return json_response(
        Tokens(
            count=len(tokens),
            max_model_len=serving.engine.facts.max_model_len,
            tokens=tokens,
            token_strs=texts,
        )
    )


async def chat_tokens(serving: Serving, chat: Conversation) -> list[int]:
    """The tokens of a conversation by the chat template, also of one that is too long for the context. Raises
    RequestError."""
    tokenizer = need_tokenizer(serving.engine.tokenizer, "A chat")
    messages = ChangingLines(serving.engine.facts.strip_lines).without(chat.messages)

    def read() -> list[int]:
        try:
            text = tokenizer.render_chat(messages, **chat.template_options)
        except RequestError as error:
            error.param = chat.prompt_field
            raise
        return _encoded(tokenizer, text, False, chat.prompt_field)

    return await asyncio.to_thread(read)


def _encoded(tokenizer: Tokenizer, text: str, special: bool, field: str) -> list[int]:
    if len(text) > LONGEST_TEXT:
        raise RequestError(
            f"{field} has {len(text):,} characters; send at most {LONGEST_TEXT:,} at once", field
        )
    return tokenizer.encode(text, special)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Text:
    """The text of token ids."""
    serving = serving_of(request)
    serving.model_named(body.model)
    tokenizer = need_tokenizer(serving.engine.tokenizer, "Text")
    vocab_size = serving.engine.facts.vocab_size
    for place, token in enumerate(body.tokens):
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"token id {token} at position {place} is outside the vocabulary of {vocab_size} tokens; ids"
                " are below that, from 0 on",
                "tokens",
            )
    return Text(prompt=await asyncio.to_thread(tokenizer.decode, body.tokens, bool(body.skip_special_tokens)))
