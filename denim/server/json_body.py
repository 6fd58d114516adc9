"""Bodies of requests: JSON that means one thing only.

Owns how a body is read and what is refused before any field is looked at: too much, too slow, not JSON, keys
that come twice, numbers and characters that do not exist, nesting without end. Knows no fields.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from math import isinf
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute

from denim.ledger.units import size_text
from denim.server.errors import ApiError, ClientGoneError
from denim.server.serving import serving_of

DEEPEST = 100
"""Levels of nesting: far more than any schema needs, far less than what exhausts a stack."""

SHORT_BODY = 64 * 1024
"""Bytes that are read in a millisecond, on the spot."""

# All clients wait while fields are checked, some microseconds a value. 32 MiB have room for 16 million.
MOST_NUMBERS = 2**21
"""Values in all: the token ids of the longest prompt that there is a model for, twice."""
MOST_PARTS = 100_000
"""Values but for numbers in lists: those of a conversation of ten thousand messages."""
MOST_KEYS = 10_000
"""Of one object: each that is unknown would be an error of its own."""


class JsonRequest(Request):
    """A request whose body is read within the server's limits."""

    async def body(self) -> bytes:
        """Raises ApiError: 408 when it comes too slowly, 413 when it is too large."""
        if not hasattr(self, "_body"):
            options = serving_of(self).options
            try:
                async with asyncio.timeout(options.body_timeout):
                    self._body = await self._read(int(options.max_body))
            except TimeoutError:
                raise ApiError(
                    408,
                    f"the body did not arrive within the server's body_timeout of"
                    f" {options.body_timeout:g} s; send it faster, or less",
                    param="body_timeout",
                    headers=_CLOSE,
                ) from None
        return self._body

    async def _read(self, limit: int) -> bytes:
        too_large = ApiError(
            413,
            f"the body is larger than the server's max_body of {size_text(limit)}; send less",
            param="max_body",
            headers=_CLOSE,
        )
        declared = self.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > limit:
            raise too_large
        parts, size = [], 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise too_large
            if not message.get("more_body"):
                return b"".join(parts)

    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= SHORT_BODY:
            return parse_json(body)
        return await asyncio.to_thread(parse_json, body)  # others go on meanwhile


class JsonRoute(APIRoute):
    """A route whose endpoint takes a JSON body, or none."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        takes_body = self.body_field is not None

        async def strict(request: Request) -> Response:
            request = JsonRequest(request.scope, request.receive)
            if takes_body and not _is_json(request.headers.get("content-type", "")):
                raise ApiError(415, "the body must be JSON; send the header Content-Type: application/json")
            return await handle(request)

        return strict


def parse_json(body: bytes) -> Any:
    """The value of a JSON text in UTF-8. Raises ApiError: 400 for everything else, 413 for more values than
    anybody has use for."""
    if body.count(b",") > MOST_NUMBERS:  # those in strings count too, which takes a string of megabytes
        raise _too_many(MOST_NUMBERS, "values")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise _bad(f"it is not UTF-8 at byte {error.start}") from None
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")  # which one of Python's messages ends with
        raise _bad(f"{what} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise _bad(f"it is nested deeper than {DEEPEST} levels") from None
    except ValueError:  # an integer with more digits than Python reads
        raise _bad("it has a number of thousands of digits") from None
    _check(value, surrogates="\\ud" in text.lower())
    return value


_CLOSE = {"connection": "close"}  # the rest of the body is not read


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _bad(why: str, param: str | None = None) -> ApiError:
    return ApiError(400, f"The body is not valid JSON: {why}.", param=param, code="invalid_json")


def _too_many(most: int, what: str) -> ApiError:
    return ApiError(413, f"the body has more than {most:,} {what}; send less in one request")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MOST_KEYS:
        raise _too_many(MOST_KEYS, "keys in one object")
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _bad(f"the key {twice!a} comes twice in one object", param=twice)
    return result


def _constant(name: str) -> NoReturn:
    raise _bad(f"{name} is no JSON number")


def _float(text: str) -> float:
    value = float(text)
    if isinf(value):
        raise _bad(f"the number {text[:20]} is too large")
    return value


def _check(value: Any, surrogates: bool) -> None:
    """Refuse too many values, deep nesting and, where there may be some, halves of surrogate pairs, with the
    place."""
    level: list[tuple[str, Any]] = [("", value)]
    parts = 0
    for _ in range(DEEPEST):
        below: list[tuple[str, Any]] = []
        for path, item in level:
            inside: Sequence[tuple[object, Any]] = ()
            if isinstance(item, dict):
                inside = list(item.items())
                if surrogates and any(_halved(key) for key in item):
                    raise _bad("a key holds half of a surrogate pair", param=path.strip(".") or None)
            elif isinstance(item, list):
                inside = [(at, inner) for at, inner in enumerate(item) if not _is_leaf(inner)]
            elif surrogates and isinstance(item, str) and _halved(item):
                raise _bad("a string holds half of a surrogate pair", param=path.strip("."))
            parts += len(inside)
            if parts > MOST_PARTS:
                raise _too_many(MOST_PARTS, "values beside numbers in lists")
            below += [(f"{path}.{key}", inner) for key, inner in inside]
        level = below
        if not level:
            return
    raise _bad(f"it is nested deeper than {DEEPEST} levels")


def _is_leaf(value: object) -> bool:
    return value is None or isinstance(value, int | float)


def _halved(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
