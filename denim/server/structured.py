"""The form that an answer must have, as the APIs ask for it.

Owns the fields: `response_format` of the OpenAI API, `structured_outputs` of vLLM. What a form may be and how
it is enforced is `denim.structured_output`'s.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from denim.errors import RequestError
from denim.server.base_model import ApiModel, Items
from denim.structured_output import StructuredOutput


class TextFormat(ApiModel):
    type: Literal["text"] = "text"


class JsonObjectFormat(ApiModel):
    type: Literal["json_object"]


class JsonSchema(ApiModel):
    """`strict` is without effect: a schema always holds."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(ApiModel):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(ApiModel):
    """vLLM's field: exactly one of these."""

    json_: dict[str, Any] | str | bool | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None


def structured_output(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None = None
) -> StructuredOutput | None:
    """None: any text. Raises RequestError for a form that cannot be had."""
    asks_format = response_format is not None and response_format.type != "text"
    if structured_outputs is not None:
        if asks_format:
            raise RequestError("give response_format or structured_outputs, not both", "structured_outputs")
        given = structured_outputs.model_dump(by_alias=True, exclude_none=True)
        return _made("structured_outputs", given)
    if isinstance(response_format, JsonSchemaFormat):
        return json_schema_output("response_format", response_format.json_schema.schema_)
    return _made("response_format", {"json_object": True}) if asks_format else None


def json_schema_output(param: str, schema: Any) -> StructuredOutput:
    """Text that fits a JSON schema, which the request's field `param` holds. Raises RequestError."""
    return _made(param, {"json_object": True} if schema is None else {"json": schema})


def _made(param: str, given: dict[str, Any]) -> StructuredOutput:
    try:
        return StructuredOutput(**given, named=param)
    except RequestError as error:
        inner = f"{param}.{error.param}" if param == "structured_outputs" and error.param else param
        raise RequestError(str(error), inner) from error
