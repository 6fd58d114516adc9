"""Calls as JSON objects with a name and arguments: one, several in a row, or a list of them.

The form of hermes (Qwen3-Next, Granite 4, Falcon-H1), MiniMax-M1, Nemotron-H, Jamba and Granite 3; they
differ in their markers only.
"""

from __future__ import annotations

import json

from denim.server.incoming import SPACE, Incoming, Reader, Unreadable
from denim.server.tool_calls.calls import Calls
from denim.server.tool_calls.json_extent import JsonExtent

ARGUMENTS = ("arguments", "parameters")  # Llama's name for them is common, too


def read_json_calls(source: Incoming, calls: Calls, close: str, listed: bool = False) -> Reader[None]:
    """Read calls up to and with `close`, or, where that is empty, up to the end of the list or the object.
    `listed`: the list was opened before."""
    if not listed and (yield from source.skip()) == "[":
        listed = bool(source.take(1))
    first = calls.count
    while True:
        next_ = yield from source.skip(SPACE + ",")
        if next_ == "{":
            yield from _read_call(source, calls)
            source.mark()
        elif next_ == "]" and listed:
            source.take(1)
            listed = False
        elif calls.count == first:
            raise Unreadable
        else:
            yield from source.expect(close)
            return
        if not close and not listed:
            return


def _read_call(source: Incoming, calls: Calls) -> Reader[None]:
    """Read one object. Its name may stand behind its arguments, which then come at once."""
    source.take(1)
    name: str | None = None
    held = "{}"
    started = False
    next_ = yield from source.skip()
    while next_ != "}":
        key = json_text((yield from _value(source)))
        yield from source.skip()
        yield from source.expect(":")
        next_ = yield from source.skip()
        if key == "name":
            name = json_text((yield from _value(source)))
        elif key not in ARGUMENTS:
            yield from _value(source)
        elif name is not None and next_ == "{":
            yield calls.start(name)
            source.mark()
            started = True
            yield from calls.json_arguments(source)
        else:
            held = _object((yield from _value(source)))
        next_ = yield from source.skip()
        if next_ == ",":
            source.take(1)
            next_ = yield from source.skip()
        elif next_ != "}":
            raise Unreadable
    source.take(1)
    if name is None:
        raise Unreadable
    if not started:
        yield calls.start(name)
        yield calls.arguments(held)


def _value(source: Incoming) -> Reader[str]:
    """Read a JSON value whole."""
    text = ""
    extent = JsonExtent()
    while True:
        text += source.take(extent.scan(source.rest))
        if extent.done:
            return text
        yield from source.more()


def json_text(text: str) -> str:
    """The string that JSON `text` stands for; Unreadable if it is none."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        raise Unreadable from None
    if not isinstance(value, str):
        raise Unreadable
    return value


def _object(text: str) -> str:
    """Arguments that came in another way: an object as it is, an object inside a string, none at all."""
    if text.startswith('"'):
        text = json_text(text).strip()
    return "{}" if text in ("", "null") else text
