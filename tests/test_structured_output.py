"""The fields of StructuredOutput: checked when it is made."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from denim import RequestError, SamplingParams, StructuredOutput
from denim.structured_output import MAX_CHARACTERS


def test_schemas_are_kept_as_text() -> None:
    assert StructuredOutput(json={"type": "integer"}).json == '{"type": "integer"}'
    assert StructuredOutput(json='{"type":"integer"}').json == '{"type":"integer"}'
    assert StructuredOutput(json=True).json == "true"


def test_it_is_a_key_and_travels() -> None:
    one = StructuredOutput(choice=["a", "b", "a"], after="</think>")
    assert one == pickle.loads(pickle.dumps(one))
    assert {one: 1}[StructuredOutput(choice=("a", "b"), after="</think>")] == 1
    assert one.kind == "choice"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "exactly one of json, json_object, regex, choice, grammar, structural_tag; got none"),
        ({"regex": "a", "choice": ["b"]}, "got regex, choice"),
        ({"json": False}, "allows no text"),
        ({"json": "{"}, "json: is not JSON"),
        ({"json": 3}, "must be a JSON object or its text, not int"),
        ({"json": {"x": object()}}, "cannot be written as JSON"),
        ({"json": "[" * 100_000}, "is not JSON"),
        ({"json": {"not": {}}}, "'not'"),
        ({"json_object": 2}, "must be True or False"),
        ({"regex": ""}, "regex: must be a string of at least one character"),
        ({"regex": 3}, "regex: must be a string"),
        ({"grammar": ["root ::= x"]}, "grammar: must be a string"),
        ({"choice": []}, "choice: must be a list of at least one string"),
        ({"choice": "ab"}, "choice: must be a list"),
        ({"choice": ["a", ""]}, "strings of at least one character"),
        ({"structural_tag": "nonsense"}, "structural_tag: is not JSON"),
        ({"regex": "a", "after": ""}, "after: must be a string"),
        ({"regex": "a", "opening": "<think>"}, "opening: needs 'after'"),
        ({"regex": "a" * (MAX_CHARACTERS + 1)}, "regex: has 262,"),
    ],
)
def test_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        StructuredOutput(**given)


def test_parameters_take_nothing_else() -> None:
    with pytest.raises(RequestError, match="structured=.*must be a StructuredOutput or None"):
        SamplingParams(structured={"regex": "a"})  # type: ignore[arg-type]
