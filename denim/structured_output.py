"""What form the text of a completion must have: JSON, a regular expression, one of a few strings, a grammar.

Owns the fields, their checks and limits; names and meanings are vLLM's, but for `after`. Knows nothing of
tokens or of how a form is enforced.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from denim.errors import RequestError
from denim.json_schema import check_schema

MAX_CHARACTERS = 256 * 1024  # of one description; compiling takes about a second for so many
KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


@dataclass(frozen=True)
class StructuredOutput:
    """Exactly one of these is set:

    json: a JSON schema, as an object or as its text; see `denim.json_schema` for what it may ask.
    json_object: True: any JSON object.
    regex: a regular expression that the whole text matches.
    choice: the text is one of these strings.
    grammar: a grammar in GBNF, llama.cpp's form of EBNF; the text matches its rule `root`.
    structural_tag: xgrammar's structural tag, as an object or as its text.

    after: the form begins behind the first occurrence of this text and up to two line breaks; before it the
        text is free; None: at once. So a model may reason first: after="</think>".
    opening: with `after`: the free text is there only if the text begins with this; None: it always is.
    named: what errors call a form that cannot be compiled; None: the name of its field.

    After construction `json` and `structural_tag` are texts. Raises RequestError.
    """

    json: Any = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    structural_tag: Any = None
    after: str | None = None
    opening: str | None = None
    named: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if self.json is False:
            raise _bad("json", "the schema false allows no text")
        if len(given) != 1:
            raise RequestError(
                f"structured output needs exactly one of {', '.join(KINDS)}; got {', '.join(given) or 'none'}"
            )
        for name in ("json", "structural_tag"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _json_text(name, getattr(self, name)))
        if self.json_object not in (True, False):
            raise _bad("json_object", "must be True or False")
        if self.opening is not None and self.after is None:
            raise _bad("opening", "needs 'after', where what it opens ends")
        for name in ("regex", "grammar", "after", "opening"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise _bad(name, "must be a string of at least one character")
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        size = sum(len(str(getattr(self, entry.name))) for entry in fields(self))
        if size > MAX_CHARACTERS:
            raise _bad(given[0], f"has {size:,} characters; at most {MAX_CHARACTERS:,} are allowed")
        if self.json is not None:
            check_schema(_parsed("json", self.json), "json")

    @property
    def kind(self) -> str:
        """The field that is set."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))


def _bad(name: str, rule: str) -> RequestError:
    return RequestError(f"{name}: {rule}", name)


def _json_text(name: str, value: object) -> str:
    """The JSON text of a value that may be text already."""
    if isinstance(value, str):
        _parsed(name, value)
        return value
    if not isinstance(value, Mapping | bool):
        raise _bad(name, f"must be a JSON object or its text, not {type(value).__name__}")
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise _bad(name, f"cannot be written as JSON: {error}") from error


def _parsed(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad(name, f"is not JSON: {error}") from error


def _choices(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise _bad("choice", "must be a list of at least one string")
    for string in value:
        if not isinstance(string, str) or not string:
            raise _bad("choice", "must hold strings of at least one character")
    return tuple(dict.fromkeys(value))
