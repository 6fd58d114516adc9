"""Calls as Python writes them, name(key=value, …): LFM2's form, a list, and OLMo's, one call a line.

Each argument is given out when it is whole. Values may be any literals, Python's or JSON's.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from denim.server.incoming import SPACE, Incoming, Reader, Unreadable
from denim.server.tool_calls.calls import Calls
from denim.server.tool_calls.json_calls import read_json_calls

_NAME = re.compile(r"[\w.-]+")
_INTERESTING = re.compile(r"""["'()\[\]{},\\]""")
_CONSTANTS = {"true": True, "false": False, "null": None}


def read_python_calls(source: Incoming, calls: Calls, close: str) -> Reader[None]:
    """Read calls, with or without brackets around them, up to and with `close`. LFM2 may be asked to write
    JSON instead."""
    listed = (yield from source.skip()) == "[" and bool(source.take(1))
    if (yield from source.skip()) == "{":
        yield from read_json_calls(source, calls, close, listed)
        return
    first = calls.count
    while True:
        next_ = yield from source.skip(SPACE + ",]")
        if _NAME.match(next_):
            yield from _read_call(source, calls)
            source.mark()
        elif calls.count == first:
            raise Unreadable
        else:
            yield from source.expect(close)
            return


def _read_call(source: Incoming, calls: Calls) -> Reader[None]:
    name = (yield from source.until("(")).strip()
    if not _NAME.fullmatch(name):
        raise Unreadable
    values: list[str] = []
    closed = False
    while not closed:
        text, mark = yield from _argument(source)
        closed = mark == ")"
        if not text.strip() and closed:
            break
        key, sign, value = text.partition("=")
        if not sign or not _NAME.fullmatch(key.strip()):
            raise Unreadable
        piece = f"{json.dumps(key.strip())}: {_json(value)}"
        if not values:
            yield calls.start(name)
            yield calls.arguments("{")
        yield calls.arguments(f", {piece}" if values else piece)
        source.mark()
        values.append(piece)
    if not values:
        yield calls.start(name)
        yield calls.arguments("{")
    yield calls.arguments("}")


def _argument(source: Incoming) -> Reader[tuple[str, str]]:
    """Read up to and with the comma or the bracket that ends an argument; returns the text and which."""
    depth = 0
    quote = ""
    at = 0
    while True:
        while found := _INTERESTING.search(source.rest, at):
            at = found.end()
            character = found.group()
            if character == "\\":
                at += 1
            elif quote:
                quote = "" if character == quote else quote
            elif character in "\"'":
                quote = character
            elif not depth and character in ",)":
                text = source.take(at)
                return text[:-1], character
            elif character in "([{":
                depth += 1
            elif character in ")]}":
                depth -= 1
        at = max(at, len(source.rest))
        yield from source.more()


def _json(text: str) -> str:
    """JSON of a literal. Unreadable for anything else."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return json.dumps(_literal(tree.body), ensure_ascii=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise Unreadable from None


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | bool() | None as value):
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_literal(part) for part in parts]
        case ast.Dict(keys=keys, values=values):
            return {
                _key(key): _literal(value) for key, value in zip(keys, values, strict=True) if key is not None
            }
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
    raise ValueError(node)


def _key(node: ast.expr) -> str:
    value = _literal(node)
    return value if isinstance(value, str) else json.dumps(value)
