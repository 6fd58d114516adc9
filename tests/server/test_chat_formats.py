"""Answers of chats in a form that was asked for, by the official client."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pydantic
import pytest

from tests.server.chats import SHORT, SILENT, chunks_of, text_of


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    people: int = pydantic.Field(ge=0, le=9999)


CITY = {"name": "city", "schema": City.model_json_schema(), "strict": True}
JSON_SCHEMA = {"type": "json_schema", "json_schema": CITY}


@pytest.mark.parametrize("thinks", [False, True])
def test_json_by_a_schema(client: openai.OpenAI, thinks: bool) -> None:
    """Behind the reasoning, where there is some."""
    body = SHORT | {"max_tokens": 400, "extra_body": {} if thinks else SILENT}
    choice = client.chat.completions.create(response_format=JSON_SCHEMA, **body).choices[0]
    assert choice.finish_reason == "stop"
    City.model_validate_json(choice.message.content)
    assert bool(choice.message.reasoning_content) == thinks
    assert text_of(chunks_of(client, response_format=JSON_SCHEMA, **body)) == choice.message.content


def test_the_helper_of_the_client_parses(client: openai.OpenAI) -> None:
    body = SHORT | {"max_tokens": 100, "extra_body": SILENT}
    answer = client.chat.completions.parse(response_format=City, **body)
    assert isinstance(answer.choices[0].message.parsed, City)


def test_json_of_any_kind(client: openai.OpenAI) -> None:
    body = SHORT | {"max_tokens": 300, "n": 3, "temperature": 1.0, "seed": 1, "extra_body": SILENT}
    for choice in client.chat.completions.create(response_format={"type": "json_object"}, **body).choices:
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
        else:
            assert choice.message.content.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"choice": ["Berlin", "Bern"]}, "Berlin|Bern"),
        ({"grammar": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"json": {"type": "integer", "minimum": 10, "maximum": 20}}, "1[0-9]|20"),
    ],
    ids=str,
)
def test_vllm_s_structured_outputs(client: openai.OpenAI, form: dict[str, Any], pattern: str) -> None:
    body = SHORT | {"temperature": 1.0, "seed": 3, "n": 4}
    choices = client.chat.completions.create(**body, extra_body=SILENT | {"structured_outputs": form}).choices
    for choice in choices:
        assert re.fullmatch(pattern, choice.message.content)
        assert choice.finish_reason == "stop"


def test_plain_text_is_a_format_too(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**SHORT, response_format={"type": "text"}, extra_body=SILENT)
    assert answer.choices[0].message.content
