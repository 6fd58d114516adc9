"""The calls of one reply: which tools there are, and the number and id of each call.

Knows the request's tools as the OpenAI API has them; nothing of how a model writes a call.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from denim.server.incoming import Incoming, Reader, Unreadable
from denim.server.reply_parts import ToolCallArguments, ToolCallStart
from denim.server.tool_calls.json_extent import JsonExtent

Tool = Mapping[str, Any]  # {"type": "function", "function": {"name": …, "parameters": JSON schema}}


class Calls:
    """`strict`: a call of a tool that was not offered is no call. It is set where text that merely speaks of
    calls is likely, which is inside reasoning."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._schemas = {function_of(tool)["name"]: parameters_of(tool) for tool in tools}
        self.strict = False
        self.count = 0

    def start(self, name: str, id: str | None = None) -> ToolCallStart:
        """The next call begins. Raises Unreadable for a name that can be none."""
        if not name or (self.strict and name not in self._schemas):
            raise Unreadable
        index = self.count
        self.count += 1
        return ToolCallStart(index, id or new_call_id(), name)

    def arguments(self, piece: str) -> ToolCallArguments:
        """More of the arguments of the last call."""
        return ToolCallArguments(self.count - 1, piece)

    def schema(self, name: str) -> Mapping[str, Any]:
        """The JSON schema of a tool's parameters; empty where there is none."""
        return self._schemas.get(name, {})

    def json_arguments(self, source: Incoming) -> Reader[None]:
        """Read a JSON value as the arguments of the last call, giving it out as it comes."""
        extent = JsonExtent()
        while True:
            piece = source.take(extent.scan(source.rest))
            if piece:
                source.mark()
                yield self.arguments(piece)
            if extent.done:
                return
            yield from source.more()


def new_call_id() -> str:
    """As the OpenAI API makes them: 24 characters that nobody has seen before."""
    return f"call_{secrets.token_hex(12)}"


def function_of(tool: Tool) -> Mapping[str, Any]:
    return tool["function"]


def parameters_of(tool: Tool) -> Mapping[str, Any]:
    return function_of(tool).get("parameters") or {}
