"""Bodies of `/v1/responses`, as the OpenAI API has them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from denim.errors import RequestError
from denim.sampling_params import MAX_LOGPROBS, SamplingParams
from denim.server.base_model import ApiModel, Items
from denim.server.responses_items import InputItem
from denim.server.schema import CacheSalt, check_tool_choice, checked_stop, ranged
from denim.server.structured import (
    JsonObjectFormat,
    TextFormat,
    json_schema_output,
    structured_output,
)
from denim.structured_output import StructuredOutput

NOT_KEPT = "nothing is stored between requests; send the whole conversation as input"


class ResponsesTool(ApiModel):
    """A function. The API's own tools (web search, files, …) are not served."""

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesNamedTool(ApiModel):
    type: Literal["function"]
    name: str


class Reasoning(ApiModel):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        default=None, description="Without effect."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(
        default=None, description="Without effect."
    )


class NamedSchemaFormat(ApiModel):
    """`strict` is without effect: a schema always holds."""

    type: Literal["json_schema"]
    name: str
    schema_: dict[str, Any] | bool = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(ApiModel):
    format: TextFormat | JsonObjectFormat | NamedSchemaFormat | None = Field(
        default=None, discriminator="type"
    )
    verbosity: Literal["low", "medium", "high"] | None = Field(default=None, description="Without effect.")


Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""What the API can be asked to add; all but the first are of things that are not served, and add nothing."""


class ResponsesRequest(ApiModel):
    """Input, to be answered."""

    input: str | Items[InputItem]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, description="Default: what the context leaves.")
    temperature: float | None = ranged("0 takes the likeliest token.", minimum=0)
    top_p: float | None = ranged("The fewest likeliest tokens of so much.", exclusiveMinimum=0, maximum=1)
    top_logprobs: int | None = Field(
        default=None, ge=0, le=MAX_LOGPROBS, description="Log-probabilities of so many."
    )
    include: Items[Included] | None = Field(
        default=None, description="message.output_text.logprobs has an effect."
    )
    stream: bool | None = None
    stream_options: dict[str, Any] | None = Field(
        default=None, description="Without effect: nothing is padded."
    )
    tools: Items[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesNamedTool | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = Field(default=None, description="Without effect: of the API's own tools.")
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = Field(default=None, description="auto is refused.")
    previous_response_id: str | None = Field(default=None, description="Refused: nothing is stored.")
    conversation: str | dict[str, Any] | None = Field(default=None, description="Refused: nothing is stored.")
    background: bool | None = Field(default=None, description="true is refused.")
    store: bool | None = Field(default=None, description="Without effect: nothing is stored.")
    metadata: dict[str, Any] | None = Field(default=None, description="Given back.")
    user: str | None = Field(default=None, description="Without effect, as the following ones.")
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Denim's, as the following ones."
    )
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Items[str] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    priority: int | None = None
    cache_salt: CacheSalt | None = None
    no_store: bool | None = None

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or ())

    def _structured(self) -> StructuredOutput | None:
        form = self.text.format if self.text is not None else None
        if isinstance(form, NamedSchemaFormat):
            return json_schema_output("text.format", form.schema_)
        return structured_output(form)

    def params(self) -> SamplingParams:
        """Raises RequestError."""
        names = {
            *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
            *("repetition_penalty", "seed", "ignore_eos", "min_tokens"),
        }
        given = self.model_dump(include=names, exclude_none=True)
        return SamplingParams(
            max_tokens=self.max_output_tokens,
            logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
            stop=checked_stop("stop", self.stop),
            structured=self._structured(),
            **given,
        )

    def check(self) -> None:
        """Refuse what cannot be served. Raises RequestError."""
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name) is not None:
                raise RequestError(f"{name} is not served: {NOT_KEPT}", name)
        if self.background:
            raise RequestError(f"background is not served: {NOT_KEPT}", "background")
        if self.truncation == "auto":
            raise RequestError("truncation='auto' is not served; shorten the input", "truncation")
        if not self.input:
            raise RequestError("input is empty; give text, or items", "input")
        offered = [tool.name for tool in self.tools or ()]
        named = self.tool_choice.name if isinstance(self.tool_choice, ResponsesNamedTool) else None
        check_tool_choice(self.tool_choice == "required", named, offered)


class InputDetails(ApiModel):
    cached_tokens: int


class OutputDetails(ApiModel):
    reasoning_tokens: int


class ResponsesUsage(ApiModel):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Incomplete(ApiModel):
    reason: Literal["max_output_tokens"]


class Response(ApiModel):
    """The answer. Items of `output`: reasoning, message, function_call."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool = False
    error: dict[str, Any] | None = None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: Reasoning
    service_tier: str = "default"
    store: bool = False
    temperature: float | None
    text: TextOptions
    tool_choice: Literal["none", "auto", "required"] | ResponsesNamedTool
    tools: list[ResponsesTool]
    top_p: float | None
    truncation: str = "disabled"
    usage: ResponsesUsage | None
