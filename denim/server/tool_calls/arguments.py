"""Arguments that a model writes as plain text, as JSON by the tool's schema.

Knows JSON schemas as far as the type of one property goes. What fits no type that is allowed stays a string:
whoever called will see what the model wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

_WORDS = {"true": True, "false": False, "null": None, "none": None}  # also as Python writes them
_NESTED = ("anyOf", "oneOf", "allOf")


def is_text(schema: Mapping[str, Any], name: str) -> bool:
    """Whether argument `name` of a tool with this schema can only be a string."""
    return _types(schema, name) <= {"string"}


def json_argument(text: str, schema: Mapping[str, Any], name: str) -> str:
    """JSON for argument `name` that was written as `text`."""
    types = _types(schema, name)
    stripped = text.strip()
    if types <= {"string"}:
        return json.dumps(text, ensure_ascii=False)
    try:
        value = json.loads(stripped)
    except (ValueError, RecursionError):
        if stripped.lower() not in _WORDS:
            return json.dumps(text, ensure_ascii=False)
        value = _WORDS[stripped.lower()]
        stripped = json.dumps(value)
    return stripped if _type_of(value) & types else json.dumps(text, ensure_ascii=False)


def _types(schema: Mapping[str, Any], name: str) -> set[str]:
    """Types that the schema allows for one property; none where it does not say."""
    properties = schema.get("properties")
    found = properties.get(name) if isinstance(properties, Mapping) else None
    return set(_named_types(found)) if isinstance(found, Mapping) else set()


def _named_types(schema: Mapping[str, Any]) -> Iterator[str]:
    named = schema.get("type", [])
    yield from [named] if isinstance(named, str) else named
    if "enum" in schema and not named:
        for value in schema["enum"]:
            yield from _type_of(value)
    for key in _NESTED:
        for part in schema.get(key, ()):
            if isinstance(part, Mapping):
                yield from _named_types(part)


def _type_of(value: Any) -> set[str]:
    """Names of a JSON value's type."""
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
        case _:
            return {"object"}
