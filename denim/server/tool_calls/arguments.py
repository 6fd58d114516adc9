"""Arguments that a model writes as plain text, as JSON by the tool's schema.

Knows JSON schemas as far as the type of one property goes. What fits no type that is allowed stays a string:
whoever called will see what the model wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_WORDS = {"true": True, "false": False, "null": None, "none": None}  # also as Python writes them
_NESTED = ("anyOf", "oneOf", "allOf")
_IMPLIED = {"properties": "object", "items": "array"}
MOST_REFERENCES = 8


def is_text(schema: Mapping[str, Any], name: str) -> bool:
    """Whether argument `name` of a tool with this schema can be any string, and nothing else."""
    return _types(schema, name) <= {"string"} and not _choices(schema, name)


def json_argument(text: str, schema: Mapping[str, Any], name: str) -> str:
    """JSON for argument `name` that was written as `text`."""
    types = _types(schema, name)
    stripped = text.strip()
    if stripped in _choices(schema, name):
        text = stripped
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


def _property(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The schema of one property; empty where there is none."""
    properties = schema.get("properties")
    found = properties.get(name) if isinstance(properties, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _choices(schema: Mapping[str, Any], name: str) -> Sequence[Any]:
    """The only values that a property may have, if it says so itself."""
    return _property(schema, name).get("enum", ())


def _types(schema: Mapping[str, Any], name: str) -> set[str]:
    """Types that the schema allows for one property; none where it does not say."""
    return set(_named_types(_property(schema, name), schema, MOST_REFERENCES))


def _named_types(schema: Mapping[str, Any], root: Mapping[str, Any], references: int) -> Iterator[str]:
    """`references`: so many may be followed yet, as they may lead in a circle."""
    named = schema.get("type", [])
    yield from [named] if isinstance(named, str) else named
    if not named:
        for value in (*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())):
            yield from _type_of(value)
        yield from (kind for key, kind in _IMPLIED.items() if key in schema)
    for key in _NESTED:
        for part in schema.get(key, ()):
            if isinstance(part, Mapping):
                yield from _named_types(part, root, references)
    meant = _referred(schema.get("$ref"), root) if references else None
    if meant is not None:
        yield from _named_types(meant, root, references - 1)


def _referred(path: object, root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema at a path such as #/$defs/name."""
    if not isinstance(path, str) or not path.startswith("#"):
        return None
    place: Any = root
    for key in path.removeprefix("#").strip("/").split("/"):
        place = place.get(key) if isinstance(place, Mapping) else None
    return place if isinstance(place, Mapping) else None


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
