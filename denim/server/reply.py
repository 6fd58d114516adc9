"""One reply of the model, from its deltas to its parts.

Owns what all chat APIs want of a reply: reasoning, answer, tool calls, why it ended, and how many of its
tokens were reasoning. How an API shows them is the API's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from denim.engine.outputs import StreamDelta
from denim.server.logprobs import Report
from denim.server.reply_parser import ReplyParser
from denim.server.reply_parts import (
    AnswerText,
    ReasoningText,
    ReplyPart,
    ToolCallArguments,
    ToolCallStart,
)


@dataclass
class Call:
    """A tool call as far as it has come."""

    id: str
    name: str
    arguments: str = ""


def call_arguments(call: Call) -> dict[str, Any]:
    """The arguments as an object. A call that the reply broke off has none that could be read."""
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


@dataclass
class Reply:
    """A reply as far as it has come. `finish_reason`: "stop", "length" or "tool_calls"."""

    index: int
    parser: ReplyParser
    answer: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    reasoning_tokens: int = 0
    sent: int = 0  # tokens whose ids a stream has told
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    _answering: bool = False

    def take(self, delta: StreamDelta) -> Sequence[ReplyPart]:
        """Add a delta; what it brought."""
        parts = self.parser.feed(delta.text) if delta.text else []
        if delta.finish_reason is not None:
            parts = [*parts, *self.parser.finish()]
            calls = self.parser.num_calls and delta.finish_reason == "stop"
            self.finish_reason = "tool_calls" if calls else delta.finish_reason
            self.stop_reason = delta.stop_reason
        self.tokens += delta.token_ids
        self.reports += delta.logprobs or ()
        for part in parts:
            self._add(part)
        if self.reasoning and not self._answering:
            self.reasoning_tokens = len(self.tokens)
        return parts

    def _add(self, part: ReplyPart) -> None:
        if isinstance(part, ReasoningText):
            self.reasoning += part.text
            return
        self._answering = True
        if isinstance(part, AnswerText):
            self.answer += part.text
        elif isinstance(part, ToolCallStart):
            self.calls.append(Call(part.id, part.name))
        else:
            assert isinstance(part, ToolCallArguments)
            self.calls[part.index].arguments += part.json_piece
