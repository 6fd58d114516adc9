"""Why a reply ended, and what its calls were asked with."""

from __future__ import annotations

import pytest

from denim.engine.outputs import StreamDelta
from denim.server.reply import Call, Reply, call_arguments
from denim.server.reply_parser import ReplyParser
from tests.server.tool_calls.replies import TOOLS, form

CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "ended", "told"),
    [
        (CALL, "stop", "tool_calls"),
        (CALL, "length", "length"),
        ("Well.", "stop", "stop"),
        ("Well.", "length", "length"),
    ],
)
def test_calls_are_the_reason_only_where_the_model_stopped(text: str, ended: str, told: str) -> None:
    reply = Reply(0, ReplyParser(form("hermes"), TOOLS))
    reply.take(StreamDelta("r", 0, text, [1, 2], finish_reason=ended))
    assert (reply.finish_reason, len(reply.calls)) == (told, text == CALL)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [('{"a": 1}', {"a": 1}), ('{"a": ', {}), ("[1]", {}), ("7", {}), ("", {})],
)
def test_arguments_are_an_object_or_nothing(text: str, arguments: dict) -> None:
    assert call_arguments(Call("id", "f", text)) == arguments
