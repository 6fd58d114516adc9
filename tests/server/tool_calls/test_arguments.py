"""Arguments as plain text become JSON of the type that the schema asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from denim.server.tool_calls.arguments import is_text, json_argument


def schema(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": of}}


@pytest.mark.parametrize(
    ("of", "text", "value"),
    [
        ({"type": "string"}, "3", "3"),
        ({}, "3", "3"),
        ({"type": "integer"}, " 3 ", 3),
        ({"type": "integer"}, "three", "three"),
        ({"type": "integer"}, "3.5", "3.5"),
        ({"type": "integer"}, "3.0", 3.0),
        ({"type": "number"}, "3", 3),
        ({"type": "number"}, "-2.5e3", -2500.0),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "1", "1"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "word", "word"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "7", 7),
        ({"enum": [1, 2]}, "2", 2),
        ({"const": True}, "true", True),
        ({"items": {}}, "[1]", [1]),
        ({"enum": ["a", "b"]}, " a\n", "a"),
        ({"type": "string"}, " a\n", " a\n"),
        ({"type": "array"}, '["a", {"b": 1}]', ["a", {"b": 1}]),
        ({"type": "object"}, '{"a": "é"}', {"a": "é"}),
        ({"type": "object"}, "{broken", "{broken"),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
    ],
)
def test_by_type(of: dict[str, Any], text: str, value: Any) -> None:
    assert json.loads(json_argument(text, schema(of), "x")) == value


def test_references_are_followed() -> None:
    """Also those that lead in a circle, or nowhere."""
    definitions = {
        "place": {"properties": {"x": {"type": "integer"}}},
        "either": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
        "circle": {"$ref": "#/$defs/circle"},
    }
    for name, text, value in [
        ("place", '{"x": 1}', {"x": 1}),
        ("either", "null", None),
        ("either", '{"x": 1}', {"x": 1}),
        ("circle", "1", "1"),
        ("nowhere", "1", "1"),
    ]:
        full = schema({"$ref": f"#/$defs/{name}"}) | {"$defs": definitions}
        assert json.loads(json_argument(text, full, "x")) == value


def test_an_argument_that_no_schema_names_is_text() -> None:
    assert is_text({}, "x")
    assert is_text(schema({"type": "integer"}), "y")
    assert not is_text(schema({"type": "integer"}), "x")
