"""The form of a reply: how formats, tools and reasoning go together."""

from __future__ import annotations

import json
from typing import Any

import pytest

from denim import RequestError, StructuredOutput
from denim.server.reply_form import FREE_CHOICE, ToolChoice, reply_form
from tests.server.tool_calls.replies import tool

HERMES = "<tool_call> {{ '<think>' }} </think>"
PLAIN = "{{ messages }}"
TOOLS = [tool("now"), tool("get_weather", city="string")]
STRICT = [{"type": "function", "function": TOOLS[1]["function"] | {"strict": True}}]
JSON = StructuredOutput(json_object=True)


def form(
    asked: StructuredOutput | None = None,
    tools: list[dict[str, Any]] | None = None,
    choice: ToolChoice = FREE_CHOICE,
    template: str = HERMES,
    prompt: str = "<think>\n\n</think>\n\n",
) -> StructuredOutput | None:
    return reply_form(asked, tools or [], choice, template, prompt)


def grammar(made: StructuredOutput | None) -> dict[str, Any]:
    assert made is not None
    return json.loads(made.structural_tag)


def names(calls: dict[str, Any]) -> list[str]:
    return [tag["begin"].split('"')[3] for tag in calls["tags"]]


def test_nothing_asked() -> None:
    assert form() is None
    assert form(tools=TOOLS) is None


def test_a_format_alone() -> None:
    assert form(JSON) == JSON


def test_behind_reasoning() -> None:
    """The prompt has opened it, has closed it, or leaves it to the model."""
    opened = form(JSON, prompt="assistant\n<think>\n")
    assert opened is not None
    assert (opened.after, opened.opening) == ("</think>", None)
    left = form(JSON, prompt="assistant\n")
    assert left is not None
    assert (left.after, left.opening) == ("</think>", "<think>")
    never = form(JSON, prompt="assistant\n", template=PLAIN)
    assert never is not None
    assert never.after is None


def test_demanded_calls() -> None:
    made = grammar(form(JSON, TOOLS, ToolChoice(required=True)))
    assert names(made) == ["now", "get_weather"]
    assert not made["stop_after_first"]
    assert grammar(form(None, TOOLS, ToolChoice(required=True, single=True)))["stop_after_first"]


def test_one_tool_by_name() -> None:
    made = grammar(form(None, TOOLS, ToolChoice(named="get_weather")))
    assert names(made) == ["get_weather"]
    assert made["stop_after_first"]


def test_a_format_or_calls() -> None:
    made = grammar(form(JSON, TOOLS))
    assert made["type"] == "or"
    assert [part["type"] for part in made["elements"]] == ["json_schema", "tags_with_separator"]


def test_strict_tools_and_single_calls_bind_free_calls() -> None:
    made = grammar(form(None, [*TOOLS[:1], *STRICT]))
    assert (made["type"], made["triggers"]) == ("triggered_tags", ["<tool_call>"])
    assert names(made) == ["now", "get_weather"]
    assert grammar(form(None, TOOLS, ToolChoice(single=True)))["stop_after_first"]


def test_a_template_without_calls() -> None:
    assert form(None, TOOLS, template=PLAIN) is None
    assert form(JSON, TOOLS, template=PLAIN) == JSON
    with pytest.raises(RequestError, match="knows no tool calls") as caught:
        form(None, TOOLS, ToolChoice(required=True), template=PLAIN)
    assert caught.value.param == "tool_choice"


def test_schemas_that_cannot_be_held_to() -> None:
    """Strict ones are refused; others are held to as far as they can be."""
    loose = {"type": "function", "function": {"name": "f", "parameters": {"properties": {}, "not": {}}}}
    strict = {"type": "function", "function": loose["function"] | {"strict": True}}  # type: ignore[operator]
    assert form(None, [loose], ToolChoice(required=True)) is not None
    with pytest.raises(RequestError, match="'not' at \\$ cannot be guaranteed") as caught:
        form(None, [*TOOLS, strict])
    assert caught.value.param == "tools.2.function.parameters"
    broken = {"type": "function", "function": {"name": "f", "parameters": {"properties": 3}}}
    with pytest.raises(RequestError, match="'properties' at \\$ must be an object"):
        form(None, [broken], ToolChoice(required=True))


def test_arguments_are_objects_whatever_the_schema_says() -> None:
    bare = {"type": "function", "function": {"name": "f"}}
    (tag,) = grammar(form(None, [bare], ToolChoice(required=True)))["tags"]
    assert tag["content"]["json_schema"] == {"type": "object", "properties": {}}
