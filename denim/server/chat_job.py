"""From a conversation to a job for the engine, and to parsers of its replies.

Owns this one step, which all chat APIs share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from denim.engine.tokenizer import need_tokenizer
from denim.errors import RequestError
from denim.sampling_params import SamplingParams
from denim.server import reasoning
from denim.server.conversation import Conversation
from denim.server.generation import Job
from denim.server.logprobs import BytesOf, ChatLogprobs, Report, chat_logprobs
from denim.server.reply import Reply
from denim.server.reply_form import reply_form
from denim.server.reply_parser import ReplyParser, parser_for
from denim.server.serving import Serving


class Wishes(Protocol):
    """What a body of any chat API says of its way through the engine; None where it says nothing."""

    priority: int | None
    cache_salt: str | None
    no_store: bool | None


class ChatJob(NamedTuple):
    job: Job
    new_parser: Callable[[], ReplyParser]
    bytes_of: BytesOf

    def replies(self) -> list[Reply]:
        """An empty reply for every completion."""
        return [Reply(index, self.new_parser()) for index in range(self.job.params.n)]

    def logprobs(self, reports: Sequence[Report], top: int | None) -> ChatLogprobs:
        """`top`: how many of the likeliest tokens to name."""
        return chat_logprobs(reports, top or 0, self.bytes_of)


async def chat_job(
    serving: Serving, conversation: Conversation, params: SamplingParams, wishes: Wishes
) -> ChatJob:
    """Render and tokenise. Raises RequestError, also when the template refuses."""
    engine = serving.engine
    serving.gate.check(params.n)  # before time is spent on the prompt
    tokenizer = need_tokenizer(engine.tokenizer, "A chat")
    try:
        prompt = await engine.read_chat(conversation.messages, **conversation.template_options)
    except RequestError as error:
        error.param = error.param or conversation.prompt_field
        raise
    text, template, tools = prompt.text or "", tokenizer.chat_template, conversation.tools
    form = reply_form(params.structured, tools, conversation.choice, template, text)
    thinking = reasoning.begins_inside(text)

    def new_parser() -> ReplyParser:
        return parser_for(template, tools=tools, thinking=thinking)

    hidden = params.skip_special_tokens and tokenizer.special_texts.isdisjoint(new_parser().markers)
    params = replace(params, structured=form, skip_special_tokens=hidden)
    job = Job(
        [prompt],
        params,
        priority=wishes.priority or 0,
        cache_salt=wishes.cache_salt,
        no_store=bool(wishes.no_store),
        prompt_field=conversation.prompt_field,
    )
    return ChatJob(job, new_parser, tokenizer.bytes_of)
