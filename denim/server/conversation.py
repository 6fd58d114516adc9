"""A conversation on its way from an API's messages to the chat template.

Owns what templates expect and APIs do not send: contents as one text, the older name of the system role; and
`cache_control` marks as places in a message's text. Knows the OpenAI API's messages, checked by their schema;
other APIs are brought into that form first.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from transformers import PreTrainedTokenizerBase

from denim.engine.tokenizer import Message
from denim.server.errors import ApiError
from denim.server.reply_form import FREE_CHOICE, ToolChoice

BETWEEN_PARTS = "\n"
"""Between two text parts of one message, as in vLLM."""

BETWEEN_SYSTEMS = "\n\n"
"""Between system messages that become one."""

SYSTEM_NAMES = {"developer": "system"}
"""OpenAI's newer name; templates know the older one."""

OPEN_OPTIONS = {"documents"}
_signature = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
CLOSED_OPTIONS = frozenset(_signature) - OPEN_OPTIONS | {"messages", "add_generation_prompt"}
"""What steers rendering itself, and is not for clients."""

MOST_MARKS = 16
"""`cache_control` marks of a conversation: each costs a rendering. Anthropic's API allows 4."""


@dataclass(frozen=True)
class Conversation:
    """What the template renders. `tools` are OpenAI's, called as `choice` says; `options` go to the template
    by name. `prompt_field`: where the request has the messages."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    options: dict[str, Any]
    choice: ToolChoice
    prompt_field: str

    def __post_init__(self) -> None:
        """Raises ApiError for an option that is not for clients, and for too many marks."""
        closed = sorted(CLOSED_OPTIONS & self.options.keys())
        if closed:
            raise ApiError(
                400,
                f"chat_template_kwargs has {closed[0]!r}, which is not for requests to set; leave it out",
                param=f"chat_template_kwargs.{closed[0]}",
            )
        marks = sum(len(message.get("cache_control", ())) for message in self.messages)
        if marks > MOST_MARKS:
            raise ApiError(
                400,
                f"the conversation has {marks} cache_control marks; at most {MOST_MARKS}",
                param=self.prompt_field,
            )

    @property
    def template_options(self) -> dict[str, Any]:
        return self.options | ({"tools": self.tools} if self.tools else {})


def options_with_effort(given: Mapping[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """`chat_template_kwargs`, and what OpenAI's reasoning effort is to templates: "none" switches thinking
    off, other values are passed on. What was `given` by name goes first."""
    options = dict(given or {})
    if effort == "none":
        options.setdefault("enable_thinking", False)
    elif effort is not None:
        options.setdefault("reasoning_effort", effort)
    return options


def conversation(
    messages: Sequence[BaseModel],
    tools: Sequence[BaseModel],
    options: Mapping[str, Any],
    choice: ToolChoice = FREE_CHOICE,
) -> Conversation:
    """From the OpenAI API's messages and tools. Raises ApiError for what cannot be rendered."""
    return prepared(
        [message.model_dump(exclude_none=True) for message in messages],
        [tool.model_dump(exclude_none=True, exclude={"cache_control"}) for tool in tools],
        options,
        choice,
    )


def prepared(
    messages: Sequence[Mapping[str, Any]],
    tools: list[dict[str, Any]],
    options: Mapping[str, Any],
    choice: ToolChoice,
    prompt_field: str = "messages",
) -> Conversation:
    """The same from plain values. `cache_control` of a message or a part is a mark where it is true."""
    rendered = [
        template_message(message, f"{prompt_field}.{place}") for place, message in enumerate(messages)
    ]
    return Conversation(_one_system(rendered), tools, dict(options), choice, prompt_field)


def _one_system(messages: list[Message]) -> list[Message]:
    """System messages at the head as one: clients send instructions and developer messages apart, and most
    templates take one."""
    head = 0
    while head < len(messages) and messages[head]["role"] == "system":
        head += 1
    if head < 2:
        return messages
    text, marks = "", []
    for message in messages[:head]:
        text += BETWEEN_SYSTEMS if text else ""
        marks += [len(text) + mark for mark in message.get("cache_control", ())]
        text += message["content"]
    one: dict[str, Any] = {"role": "system", "content": text}
    return [one | ({"cache_control": marks} if marks else {}), *messages[head:]]


def template_message(message: Mapping[str, Any], where: str) -> Message:
    """The message as templates read it. Raises ApiError, naming the field `where` it stands."""
    role = message["role"]
    result: dict[str, Any] = {"role": SYSTEM_NAMES.get(role, role)}
    text, marks = _text_of(message.get("content"))
    if message.get("cache_control"):
        marks.append(len(text or ""))
    if marks:
        result["cache_control"] = sorted(set(marks))
    calls = message.get("tool_calls")
    if text is None and not calls and role != "assistant":
        raise ApiError(400, f"a message of the role {role!r} needs content", param=f"{where}.content")
    result["content"] = text or ""
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning:
        result["reasoning_content"] = reasoning
    if calls:
        result["tool_calls"] = [
            {"id": call.get("id"), "type": "function", "function": call["function"]} for call in calls
        ]
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            result[name] = message[name]
    return result


def _text_of(content: str | Sequence[Mapping[str, Any]] | None) -> tuple[str | None, list[int]]:
    """A content as one text, and the places in it (in characters) behind parts that carry a mark."""
    if content is None or isinstance(content, str):
        return content, []
    text, marks = "", []
    for at, part in enumerate(content):
        text += (BETWEEN_PARTS if at else "") + part["text"]
        if part.get("cache_control"):
            marks.append(len(text))
    return text, marks
