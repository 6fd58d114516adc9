"""What the text of a reply turns out to be: reasoning, answer, tool calls; each in pieces as they come.

Plain data. Knows nothing of markers, templates or HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningText:
    text: str


@dataclass(frozen=True, slots=True)
class AnswerText:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Call `index` of the reply (from 0) begins; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the JSON text that holds the arguments of call `index`; joined, the pieces are the whole.
    A call that the reply breaks off has only a beginning of it."""

    index: int
    json_piece: str


ReplyPart = ReasoningText | AnswerText | ToolCallStart | ToolCallArguments


def joined(parts: Iterable[ReplyPart]) -> list[ReplyPart]:
    """The same parts with neighbours of one kind (and one call) put together."""
    result: list[ReplyPart] = []
    for part in parts:
        last = result[-1] if result else None
        if isinstance(part, AnswerText) and isinstance(last, AnswerText):
            result[-1] = AnswerText(last.text + part.text)
        elif isinstance(part, ReasoningText) and isinstance(last, ReasoningText):
            result[-1] = ReasoningText(last.text + part.text)
        elif (
            isinstance(part, ToolCallArguments)
            and isinstance(last, ToolCallArguments)
            and part.index == last.index
        ):
            result[-1] = ToolCallArguments(part.index, last.json_piece + part.json_piece)
        else:
            result.append(part)
    return result
