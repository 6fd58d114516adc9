"""The form that a reply must have, put together from all that is asked of it.

Owns how response formats, demands for tool calls and reasoning go together. Knows chat templates and tools;
how a form is enforced is the engine's. The rules:

* A demand for calls ("required", or one tool by name) leaves no other text, whatever format is asked for.
* Where calls are free, a format and tools together mean: text of that format, or calls.
* A tool that is `strict` may be called freely, but its arguments must fit its schema. The schemas of others
  are held to as far as they can be, where calls are demanded or a strict tool stands beside them.
* A form begins behind the reasoning, if the prompt has opened it, or the model does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from denim.engine.grammars import structural_tag
from denim.errors import RequestError
from denim.json_schema import check_schema
from denim.server import reasoning
from denim.server.tool_calls.calls import Tool, function_of, parameters_of
from denim.server.tool_calls.formats import ToolFormat, format_of
from denim.structured_output import StructuredOutput


@dataclass(frozen=True)
class ToolChoice:
    """required: the reply is calls. named: of this tool only, once. single: at most one call."""

    required: bool = False
    named: str | None = None
    single: bool = False


FREE_CHOICE = ToolChoice()


def reply_form(
    asked: StructuredOutput | None,
    tools: Sequence[Tool],
    choice: ToolChoice,
    chat_template: str,
    prompt: str,
) -> StructuredOutput | None:
    """The form of replies to the rendered `prompt`; None: any text. `asked`: the response format.

    Raises RequestError for a demand that this model or grammars cannot meet.
    """
    form = _with_calls(asked, tools, choice, chat_template) if tools else asked
    if form is None:
        return None
    if reasoning.begins_inside(prompt):
        return replace(form, after=reasoning.CLOSE)
    if reasoning.may_begin(prompt, chat_template):
        return replace(form, after=reasoning.CLOSE, opening=reasoning.OPEN)
    return form


def _with_calls(
    asked: StructuredOutput | None, tools: Sequence[Tool], choice: ToolChoice, chat_template: str
) -> StructuredOutput | None:
    written = format_of(chat_template)
    demanded = choice.required or choice.named is not None
    if written is None:
        if demanded:
            raise RequestError(
                "this model's chat template knows no tool calls, so that none can be demanded; leave"
                " tool_choice at 'auto' or 'none'",
                "tool_choice",
            )
        return asked
    if demanded:
        chosen = [tool for tool in tools if choice.named in (None, function_of(tool)["name"])]
        single = choice.single or choice.named is not None
        return _form(written.shape.calls(_schemas(chosen), single=single))
    if asked is not None:
        calls = written.shape.calls(_schemas(tools), single=choice.single)
        text = json.loads(structural_tag(asked))["format"]
        return _form({"type": "or", "elements": [text, calls]})
    if choice.single or any(function_of(tool).get("strict") for tool in tools):
        return _form(_calls_in_text(written, tools, choice.single))
    return None


def _calls_in_text(written: ToolFormat, tools: Sequence[Tool], single: bool) -> dict[str, Any]:
    return written.shape.calls_in_text(_schemas(tools), written.open, single=single)


def _form(grammar: dict[str, Any]) -> StructuredOutput:
    try:
        return StructuredOutput(structural_tag=grammar, named="tools")
    except RequestError as error:
        raise RequestError(f"tools: {error}", "tools") from error


def _schemas(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]]:
    """The schema of each tool's arguments, which are an object whatever it says. Raises RequestError."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for place, tool in enumerate(tools):
        schema = dict(parameters_of(tool))
        strict = bool(function_of(tool).get("strict"))
        check_schema(schema, f"tools.{place}.function.parameters", loosely=not strict)
        if not schema.keys() & {"type", "$ref", "anyOf", "oneOf", "allOf"}:
            schema["type"] = "object"
        if schema.get("type") == "object":
            schema.setdefault("properties", {})
        schemas[function_of(tool)["name"]] = schema
    return schemas
