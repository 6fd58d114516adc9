"""Bodies of `/v1/chat/completions`, as the OpenAI API and vLLM have them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from denim.errors import RequestError
from denim.sampling_params import MAX_LOGPROBS, SamplingParams
from denim.server.base_model import ApiModel, Items
from denim.server.logprobs import ChatLogprobs
from denim.server.schema import SamplingFields, StreamOptions, Usage, check_tool_choice, ranged

Role = Literal["system", "developer", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "tool_calls"]

TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of content that are served, as chats and responses call them."""


class CacheControl(ApiModel):
    """A mark: the prefix cache should save what lies before. `ttl` is without effect."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: str | None = None


class ContentPart(ApiModel):
    """A part of a message. Text is what is served, a string in `text`; other types are refused by name."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="after")
    def is_text(self) -> Self:
        """Raises PydanticCustomError for what a language model does not read."""
        if self.type not in TEXT_PARTS:
            raise PydanticCustomError(
                "not_text", "{type}: this model reads text only; send text", {"type": self.type}
            )
        if self.text is None:
            raise PydanticCustomError("no_text", "the part has no text; give it some")
        return self


def arguments_object(arguments: str | dict[str, Any] | None) -> dict[str, Any]:
    """Arguments of a call as templates iterate over them; nothing and blank text are no arguments. Raises
    PydanticCustomError."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        read = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise PydanticCustomError("no_object", "arguments must be a JSON object, as text or as an object")
    return read


class EarlierFunction(ApiModel):
    """`arguments`: the API has them as JSON text."""

    name: str
    arguments: Annotated[str | dict[str, Any] | None, AfterValidator(arguments_object)] = None


class EarlierCall(ApiModel):
    """A tool call in a conversation that comes back."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: EarlierFunction
    index: int | None = None


class ChatMessage(ApiModel):
    """One message. `reasoning_content` is an assistant's, which other servers call `reasoning`; templates
    decide what they do with it."""

    role: Role
    content: str | Items[ContentPart] | None = None
    name: str | None = None
    tool_calls: Items[EarlierCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: Items[Any] | None = None
    audio: None = None
    function_call: None = None
    cache_control: CacheControl | None = None


class FunctionSpec(ApiModel):
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(ApiModel):
    type: Literal["function"]
    function: FunctionSpec
    cache_control: CacheControl | None = None


class FunctionName(ApiModel):
    name: str


class NamedTool(ApiModel):
    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class ChatRequest(SamplingFields):
    """A conversation, to be answered."""

    messages: Items[ChatMessage] = Field(min_length=1)
    model: str | None = None
    max_completion_tokens: int | None = Field(
        default=None, ge=1, description="Default: what the context leaves."
    )
    max_tokens: int | None = ranged("The older name of it.", minimum=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS, description="Needs logprobs.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: Items[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        default=None, description="none switches thinking off; the others go to the chat template."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="For the chat template, such as enable_thinking."
    )
    store: bool | None = Field(default=None, description="Without effect: nothing is stored.")
    service_tier: str | None = Field(default=None, description="Without effect.")
    safety_identifier: str | None = Field(default=None, description="Without effect.")
    prompt_cache_key: str | None = Field(
        default=None, description="Without effect: prefixes are found by content."
    )
    prompt_cache_retention: str | None = Field(default=None, description="Without effect.")
    verbosity: Literal["low", "medium", "high"] | None = Field(default=None, description="Without effect.")
    prediction: dict[str, Any] | None = Field(default=None, description="Without effect.")
    modalities: Items[Literal["text"]] | None = None
    best_of: Annotated[int | None, Field(description="Refused: ask for n completions.")] = None

    def check(self) -> None:
        """Refuse what cannot be served. Raises RequestError."""
        if self.best_of not in (None, 1):
            raise RequestError("best_of is not served; ask for n completions and choose yourself", "best_of")
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options is for stream=true only; leave out the one or set the other", "stream_options"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=true", "top_logprobs")
        if self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs are served by /v1/completions; ask there", "prompt_logprobs")
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        offered = [tool.function.name for tool in self.tools or ()]
        check_tool_choice(self.tool_choice == "required", named, offered)

    def params(self) -> SamplingParams:
        """Raises RequestError."""
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.sampling(max_tokens=most, logprobs=(self.top_logprobs or 0) if self.logprobs else None)


class FunctionCall(ApiModel):
    """`arguments`: as the model wrote them, which may have been cut."""

    name: str
    arguments: str


class ToolCall(ApiModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatAnswer(ApiModel):
    """The assistant's message."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(ApiModel):
    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(ApiModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
