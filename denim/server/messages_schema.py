"""Bodies of `/v1/messages`, as Anthropic's API has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from denim.errors import RequestError
from denim.sampling_params import SamplingParams
from denim.server.base_model import ApiModel, Items
from denim.server.chat_schema import CacheControl
from denim.server.schema import CacheSalt, check_tool_choice, checked_stop, ranged
from denim.server.structured import json_schema_output


class TextBlock(ApiModel):
    type: Literal["text"] = "text"
    text: str
    cache_control: CacheControl | None = None
    citations: Items[Any] | None = None


class ThinkingBlock(ApiModel):
    """`signature` is the API's; Denim signs nothing and reads none."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(ApiModel):
    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(ApiModel):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None
    cache_control: CacheControl | None = None


class ToolResultBlock(ApiModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Items[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class AnthropicMessage(ApiModel):
    role: Literal["user", "assistant", "system"]
    content: str | Items[Block]


class AnthropicTool(ApiModel):
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None
    input_examples: Items[dict[str, Any]] | None = Field(default=None, description="Without effect.")
    eager_input_streaming: bool | None = Field(
        default=None, description="Without effect: input always streams."
    )
    cache_control: CacheControl | None = None


class AnthropicToolChoice(ApiModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(ApiModel):
    """`budget_tokens` is without effect: a model thinks as long as it thinks."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(ApiModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(ApiModel):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="For the chat template, as reasoning_effort."
    )


class MessageFields(ApiModel):
    """What a request and the counting of its tokens have in common."""

    model: str
    messages: Items[AnthropicMessage] = Field(min_length=1)
    system: str | Items[TextBlock] | None = None
    tools: Items[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = Field(default=None, description="Without it the model does not think.")
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = Field(default=None, description="Marks the end of the last message.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Denim's: for the template."
    )
    context_management: dict[str, Any] | None = Field(default=None, description="Without effect.")


class MessagesRequest(MessageFields):
    """A conversation, to be answered."""

    max_tokens: int = Field(json_schema_extra={"minimum": 1})
    stop_sequences: Items[str] | None = None
    stream: bool | None = None
    temperature: float | None = ranged("0 takes the likeliest token.", minimum=0)
    top_p: float | None = ranged("The fewest likeliest tokens of so much.", exclusiveMinimum=0, maximum=1)
    top_k: int | None = ranged("So many likeliest tokens; 0 or -1: all.", minimum=-1)
    metadata: dict[str, Any] | None = Field(default=None, description="Without effect.")
    service_tier: str | None = Field(default=None, description="Without effect.")
    seed: int | None = Field(default=None, description="Denim's, as the following ones.")
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    priority: int | None = None
    cache_salt: CacheSalt | None = None
    no_store: bool | None = None

    def params(self) -> SamplingParams:
        """Raises RequestError."""
        names = {"temperature", "top_p", "top_k", "seed", "ignore_eos", "min_tokens"}
        given = self.model_dump(include=names, exclude_none=True)
        stops = checked_stop("stop_sequences", self.stop_sequences)
        form = self.output_config.format if self.output_config is not None else None
        if form is not None:
            given["structured"] = json_schema_output("output_config.format", form.schema_)
        return SamplingParams(max_tokens=self.max_tokens, stop=stops, **given)

    def check(self) -> None:
        """Raises RequestError."""
        if self.tool_choice is not None:
            name, kind = self.tool_choice.name, self.tool_choice.type
            if name is not None and kind != "tool":
                raise RequestError(
                    f"tool_choice has the name {name!r}, which is for the type 'tool'; leave it out here",
                    "tool_choice",
                )
            named = name or "" if kind == "tool" else None
            offered = [tool.name for tool in self.tools or ()]
            check_tool_choice(kind == "any", named, offered)
        if self.messages[-1].role == "assistant":
            raise RequestError(
                "the last message is the assistant's; beginning its answer for it is not served;"
                " end with a user's",
                "messages",
            )


class MessagesUsage(ApiModel):
    """`input_tokens` are those that were computed; with the cached ones they make the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class MessagesResponse(ApiModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(ApiModel):
    input_tokens: int


class AnthropicErrorDetail(ApiModel):
    type: str
    message: str


class AnthropicError(ApiModel):
    """Every error of this API."""

    type: Literal["error"] = "error"
    error: AnthropicErrorDetail
    request_id: str | None = None


ANTHROPIC_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": AnthropicError, "description": "The request is at fault, or comes at a bad time."},
    "5XX": {"model": AnthropicError, "description": "The server is at fault, or stops."},
}
