"""Replies in every form of tool calls, with what they say; and ways to cut a text into pieces."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from denim.server.reply_parser import ReplyParser
from denim.server.reply_parts import (
    AnswerText,
    ReasoningText,
    ReplyPart,
    ToolCallArguments,
    ToolCallStart,
    joined,
)
from denim.server.tool_calls.formats import FORMATS, ToolFormat


def tool(name: str, **types: Any) -> dict[str, Any]:
    """A tool whose parameters have these JSON types, or schemas."""
    properties = {key: value if isinstance(value, dict) else {"type": value} for key, value in types.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "…", "parameters": schema}}


TOOLS = [
    tool("get_weather", city="string", days="integer"),
    tool("write_file", path="string", text="string", lines="array"),
    tool("now"),
]


class Reply(NamedTuple):
    """A text in the form `form`; calls as (name, arguments)."""

    form: str
    text: str
    calls: list[tuple[str, Any]]
    answer: str = ""


REPLIES = [
    Reply(
        "hermes",
        'I look.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}\n'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        [("get_weather", {"city": "Zürich", "days": 3}), ("now", {})],
        "I look.",
    ),
    Reply(  # the end of a call, and quotes and brackets, inside a string
        "hermes",
        '<tool_call>{"name":"write_file","arguments":{"path":"a","text":"</tool_call>\\"}\\\\","lines":[{}]}}'
        "</tool_call>",
        [("write_file", {"path": "a", "text": '</tool_call>"}\\', "lines": [{}]})],
    ),
    Reply(  # arguments first, other keys, arguments inside a string, none at all
        "hermes",
        '<tool_call>{"arguments": {"city": "x"}, "id": 7, "name": "get_weather"}\n'
        '{"name": "now", "arguments": "{}"}, {"name": "now"} {"name": "now", "parameters": null}</tool_call>',
        [("get_weather", {"city": "x"}), ("now", {}), ("now", {}), ("now", {})],
    ),
    Reply(
        "qwen-xml",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nSan\nJosé\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>\n\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        [("get_weather", {"city": "San\nJosé", "days": 3}), ("now", {})],
    ),
    Reply(  # values that speak of tags, an empty one, one that does not fit its type, newlines of its own
        "qwen-xml",
        "Done: <tool_call><function=write_file><parameter=path></parameter><parameter=text>\n\n"
        'a </parameter> "b"\n</parameter>\nc\n\n</parameter>\n<parameter=lines>\nnone yet\n</parameter>'
        "</function></tool_call>",
        [
            (
                "write_file",
                {"path": "", "text": '\na </parameter> "b"\n</parameter>\nc\n', "lines": "none yet"},
            )
        ],
        "Done:",
    ),
    Reply(
        "ling",
        "<tool_call>get_weather<arg_key>city</arg_key>\n<arg_value>a<b>\n</arg_value>\n<arg_key>days</arg_key>"
        "<arg_value>2</arg_value></tool_call><tool_call>now</tool_call>",
        [("get_weather", {"city": "a<b>\n", "days": 2}), ("now", {})],
    ),
    Reply(
        "kimi",
        "Sure.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "北京", "days": 1}<|tool_call_end|><|tool_call_begin|>'
        "functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        [("get_weather", {"city": "北京", "days": 1}), ("now", {})],
        "Sure.",
    ),
    Reply(
        "nemotron",
        '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "x", "days": 1}}, '
        '{"name": "now", "arguments": {}}]</TOOLCALL>',
        [("get_weather", {"city": "x", "days": 1}), ("now", {})],
    ),
    Reply(
        "jamba",
        '<tool_calls>[\n  {"name": "get_weather", "arguments": {"city": "x", "days": 1}}\n]</tool_calls>',
        [("get_weather", {"city": "x", "days": 1})],
    ),
    Reply(
        "minimax",
        '<tool_calls>\n{"name": "get_weather", "arguments": {"city": "x", "days": 1}}\n'
        '{"name": "now", "arguments": {}}\n</tool_calls>',
        [("get_weather", {"city": "x", "days": 1}), ("now", {})],
    ),
    Reply(
        "granite",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "x", "days": 1}}]',
        [("get_weather", {"city": "x", "days": 1})],
    ),
    Reply(
        "lfm2",
        "<|tool_call_start|>[get_weather(city='it\\'s (x), \"y\"', days=-3), now()]<|tool_call_end|>I wait.",
        [("get_weather", {"city": 'it\'s (x), "y"', "days": -3}), ("now", {})],
        "I wait.",
    ),
    Reply(
        "lfm2",
        '<|tool_call_start|>[write_file(path="a", text="", lines=[1.5, None, {"k": (True, false)}])]'
        "<|tool_call_end|>",
        [("write_file", {"path": "a", "text": "", "lines": [1.5, None, {"k": [True, False]}]})],
    ),
    Reply(
        "lfm2",
        '<|tool_call_start|>[{"name": "now", "arguments": {}}]<|tool_call_end|>',
        [("now", {})],
    ),
    Reply(
        "olmo",
        '<function_calls>\nget_weather(city="x", days=1)\nnow()\n</function_calls>',
        [("get_weather", {"city": "x", "days": 1}), ("now", {})],
    ),
]


def form(name: str) -> ToolFormat:
    return next(form for form in FORMATS if form.name == name)


def cuts(text: str, seed: int = 0) -> Iterator[list[str]]:
    """The text whole, in pieces of 1 to 4 characters, in two at every place, and in random pieces."""
    yield [text]
    for size in (1, 2, 3, 4):
        yield [text[at : at + size] for at in range(0, len(text), size)]
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]
    chance = random.Random(seed)
    for _ in range(20):
        places = sorted(chance.sample(range(len(text) + 1), min(len(text), 9)))
        yield [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def parts_of(parser: ReplyParser, pieces: list[str]) -> list[ReplyPart]:
    """All parts, joined, and without the ids that are made at random."""
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    return [
        ToolCallStart(part.index, "call", part.name)
        if isinstance(part, ToolCallStart) and part.id.startswith("call_")
        else part
        for part in joined(parts)
    ]


def answer(parts: list[ReplyPart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, AnswerText))


def thoughts(parts: list[ReplyPart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, ReasoningText))


def calls(parts: list[ReplyPart]) -> list[tuple[str, str]]:
    """(name, JSON of the arguments) of each call."""
    arguments: dict[int, str] = {}
    names: dict[int, str] = {}
    for part in parts:
        if isinstance(part, ToolCallStart):
            assert part.index == len(names)
            names[part.index], arguments[part.index] = part.name, ""
        elif isinstance(part, ToolCallArguments):
            arguments[part.index] += part.json_piece
    return [(names[index], arguments[index]) for index in names]
