"""What a schema may ask, and what is refused because it could not be held to."""

from __future__ import annotations

from typing import Any

import pytest

from denim import RequestError
from denim.json_schema import MAX_DEPTH, check_schema


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object", "properties": {"not": {"type": "string"}, "if": {}}, "required": ["not"]},
        {"type": "array", "items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"enum": ["not", {"not": 1}]}}},
        {"anyOf": [{"type": "string", "pattern": "a"}, {"type": "string", "maxLength": 3}], "title": "x"},
        {"type": "object", "const": {"uniqueItems": True}, "uniqueItems": False},
        {"allOf": [{"type": "integer"}]},
        {"type": "string", "format": "anything"},
        {"type": "string", "minLength": 1, "maxLength": 3},
    ],
)
def test_allowed(schema: Any) -> None:
    check_schema(schema, "json")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ([], r"\$ must be a JSON schema"),
        ({"properties": {"a": 3}}, r"\$\.a must be a JSON schema"),
        ({"properties": []}, "'properties' at \\$ must be an object"),
        ({"anyOf": {}}, "'anyOf' at \\$ must be a list"),
        ({"required": "a"}, "'required' at \\$ must be a list"),
        ({"required": ["a"]}, "required property 'a' at \\$ cannot be guaranteed"),
        ({"$ref": "http://example.com/x"}, r"the '\$ref' 'http://example.com/x' at \$ cannot be guaranteed"),
        ({"items": {"$ref": "#name"}}, r"the '\$ref' '#name' at \$\.items"),
        ({"$ref": ""}, r"the '\$ref' '' at"),
        ({"items": {"not": {}}}, r"'not' at \$\.items cannot be guaranteed"),
        ({"type": "number", "multipleOf": 2}, "'multipleOf'"),
        ({"anyOf": [{"type": "array", "uniqueItems": True}]}, r"'uniqueItems' at \$\.anyOf\[0\]"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "'pattern' together with 'maxLength'"),
        ({"type": "string", "format": "date", "minLength": 3}, "'format' together with 'minLength'"),
        ({"type": "string", "pattern": "a", "format": "date"}, "'pattern' together with 'format'"),
        ({"maxLength": 3}, "'maxLength' without a 'type'"),
        ({"anyOf": [{"type": "string"}], "type": "string", "maxLength": 3}, "'maxLength' beside 'anyOf'"),
        ({"$ref": "#", "properties": {}}, "'properties' beside '\\$ref'"),
        ({"enum": [1], "const": 1}, "'const' beside 'enum'"),
        ({"allOf": [{}, {}]}, "join them into one"),
        ({"if": {}, "then": {}}, "'if'"),
    ],
)
def test_refused(schema: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        check_schema(schema, "json")
    assert caught.value.param == "json"


def deep(levels: int) -> Any:
    schema: Any = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def test_depth() -> None:
    check_schema(deep(MAX_DEPTH), "json")
    with pytest.raises(RequestError, match="deeper than 64"):
        check_schema(deep(100_000), "json")
    with pytest.raises(RequestError, match="deeper than 64"):
        check_schema(deep(MAX_DEPTH + 1), "json")


def test_loosely() -> None:
    check_schema({"not": {}, "required": ["a"], "maxLength": 3}, "json", loosely=True)
    with pytest.raises(RequestError, match="must be an object"):
        check_schema({"properties": 3}, "json", loosely=True)
