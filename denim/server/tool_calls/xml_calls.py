"""Calls with a tag for each argument, whose values are plain text: Qwen3.5's form, and Ling's.

Values become JSON by the tool's schema (`arguments.py`). A string is given out as it comes, whatever else at
its end.
"""

from __future__ import annotations

import json

from denim.server.incoming import SPACE, Incoming, Reader
from denim.server.tool_calls.arguments import is_text, json_argument
from denim.server.tool_calls.calls import Calls

CLOSE = "</tool_call>"


def read_qwen_calls(source: Incoming, calls: Calls) -> Reader[None]:
    """NL <function=NAME> NL <parameter=KEY> NL VALUE NL </parameter> NL </function> NL </tool_call>, where
    any newline may be missing. As a value may speak of tags, its own ends only where another tag follows."""
    yield from source.skip()
    yield from source.expect("<function=")
    name = (yield from source.until(">")).strip()
    yield calls.start(name)
    source.mark()
    yield calls.arguments("{")
    separator = ""
    while True:
        yield from source.skip()
        tag = yield from source.expect("<parameter=", "</function>", CLOSE)
        if tag != "<parameter=":
            break
        key = yield from source.until(">")
        yield calls.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        yield from source.begins("\n")
        yield from _value(
            source,
            calls,
            name,
            key,
            ("\n</parameter>", "</parameter>"),
            ("<parameter=", "</function>", CLOSE),
        )
    yield calls.arguments("}")
    if tag != CLOSE:
        yield from source.skip()
        yield from source.expect(CLOSE)


def read_ling_calls(source: Incoming, calls: Calls) -> Reader[None]:
    """NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> </tool_call>."""
    head = ""
    while True:
        piece, tag = source.cut(("<arg_key>", CLOSE))
        head += piece
        if tag is not None:
            break
        yield from source.more()
    name = head.strip()
    yield calls.start(name)
    source.mark()
    yield calls.arguments("{")
    separator = ""
    while tag == "<arg_key>":
        key = (yield from source.until("</arg_key>")).strip()
        yield from source.skip()
        yield from source.expect("<arg_value>")
        yield calls.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        yield from _value(source, calls, name, key, ("</arg_value>",), ("<arg_key>", CLOSE))
        yield from source.skip()
        tag = yield from source.expect("<arg_key>", CLOSE)
    yield calls.arguments("}")


def _value(
    source: Incoming, calls: Calls, tool: str, key: str, ends: tuple[str, ...], followers: tuple[str, ...]
) -> Reader[None]:
    """Read the value of argument `key` up to the first of `ends` that one of `followers` comes after."""
    schema = calls.schema(tool)
    streamed = is_text(schema, key)
    text = ""
    if streamed:
        yield calls.arguments('"')
    while True:
        piece, end = source.cut(ends)
        if end is not None and not (yield from _follows(source, followers)):
            piece += end
            end = None
        if streamed and piece:
            yield calls.arguments(json.dumps(piece, ensure_ascii=False)[1:-1])
        text += piece
        source.mark()
        if end is not None:
            break
        if not source.rest or not _holds(source, ends):
            yield from source.more()
    yield calls.arguments('"' if streamed else json_argument(text, schema, key))


def _holds(source: Incoming, ends: tuple[str, ...]) -> bool:
    return any(end in source.rest for end in ends)


def _follows(source: Incoming, followers: tuple[str, ...]) -> Reader[bool]:
    """Whether one of `followers` comes next behind white space. Reads nothing. May raise BrokenOff."""
    while True:
        ahead = source.rest.lstrip(SPACE)
        if ahead.startswith(followers):
            return True
        if not any(follower.startswith(ahead) for follower in followers):
            return False
        yield from source.more()
