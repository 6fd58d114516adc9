"""What a JSON schema may ask of generated text.

Owns the limits of a schema and the keywords that cannot be held to while text is generated: those are
refused, for a schema that is obeyed only in part is worse than none. Knows nothing of grammars or tokens.

Two things are narrower than JSON Schema, which is harmless, as what they allow is still valid: objects have
no properties beside those that the schema names (unless additionalProperties says more), and they come in the
schema's order. `oneOf` counts as `anyOf`, and `format` is held to for well-known formats only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from denim.errors import RequestError

# Compiling takes time that grows with the square of the depth: a second at 128.
MAX_DEPTH = 64

UNSUPPORTED = (
    "not",
    "if",
    "then",
    "else",
    "multipleOf",
    "uniqueItems",
    "contains",
    "minContains",
    "maxContains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "$dynamicRef",
    "$recursiveRef",
)
# What a value must be of a type to be asked; it is not asked of others.
_TYPED = (
    "minLength",
    "maxLength",
    "pattern",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "minItems",
    "maxItems",
)
_ASSERTIONS = (
    *_TYPED,
    "properties",
    "required",
    "items",
    "prefixItems",
    "additionalProperties",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
)
_TEXTS = ("pattern", "format", "minLength", "maxLength")  # of which one is heeded; both lengths are one
_WHOLE = ("anyOf", "oneOf", "allOf", "$ref", "enum", "const")  # each says all about a value
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # a schema for each name
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "propertyNames")


def check_schema(schema: object, field: str, *, loosely: bool = False) -> None:
    """Raises RequestError, naming `field`, for what is no schema, is too deep or asks for what cannot be held
    to. `loosely`: it may be held to in part."""
    waiting: list[tuple[str, object, int]] = [("$", schema, 0)]
    while waiting:
        path, part, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise RequestError(
                f"{field}: the schema is deeper than {MAX_DEPTH} at {path[:200]}; make it flatter", field
            )
        if isinstance(part, bool):
            continue
        if not isinstance(part, Mapping):
            raise RequestError(f"{field}: {path[:200]} must be a JSON schema, an object or a boolean", field)
        if not loosely:
            _check_keywords(path, part, field)
        waiting += [(inner, below, depth + 1) for inner, below in _subschemas(path, part, field)]


def _check_keywords(path: str, schema: Mapping[str, Any], field: str) -> None:
    def refuse(what: str, instead: str) -> RequestError:
        return RequestError(f"{field}: {what} at {path[:200]} cannot be guaranteed; {instead}", field)

    for keyword in UNSUPPORTED:
        if schema.get(keyword, False) is not False:
            raise refuse(repr(keyword), "leave it out")
    whole = [keyword for keyword in _WHOLE if keyword in schema]
    beside = [*whole[1:], *(keyword for keyword in _ASSERTIONS if keyword in schema)]
    if whole and beside:
        raise refuse(f"{beside[0]!r} beside {whole[0]!r}", "say both in one place")
    ref = schema.get("$ref", "#")
    if ref != "#" and not (
        isinstance(ref, str) and ref.startswith("#/")
    ):  # the compiler takes it for any JSON
        raise refuse(f"the '$ref' {ref!r:.100}", "refer to a place in this schema, such as '#/$defs/name'")
    typed = [keyword for keyword in _TYPED if keyword in schema]
    if typed and "type" not in schema:
        raise refuse(f"{typed[0]!r} without a 'type'", "say of which type the value is")
    texts = [keyword for keyword in _TEXTS if keyword in schema]
    if len(texts) > 1 and texts != ["minLength", "maxLength"]:
        raise refuse(f"{texts[0]!r} together with {texts[1]!r}", "ask for one of them")
    parts = schema.get("allOf")
    if isinstance(parts, list) and len(parts) > 1:
        raise refuse("'allOf' of several schemas", "join them into one")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise RequestError(f"{field}: 'required' at {path[:200]} must be a list of names", field)
    properties = schema.get("properties", {})
    for name in required:
        if isinstance(properties, Mapping) and name not in properties:
            raise refuse(f"the required property {name[:100]!r}", "describe it under 'properties'")


def _subschemas(path: str, schema: Mapping[str, Any], field: str) -> Iterator[tuple[str, object]]:
    for key in _NAMED:
        named = schema.get(key, {})
        if not isinstance(named, Mapping):
            raise RequestError(f"{field}: {key!r} at {path[:200]} must be an object", field)
        for name, below in named.items():
            yield f"{path}.{name}", below
    for key in _LISTED:
        listed = schema.get(key, [])
        if not isinstance(listed, list):
            raise RequestError(f"{field}: {key!r} at {path[:200]} must be a list", field)
        for place, below in enumerate(listed):
            yield f"{path}.{key}[{place}]", below
    for key in _SINGLE:
        if key in schema:
            yield f"{path}.{key}", schema[key]
