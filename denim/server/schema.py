"""What the bodies of several APIs have in common.

Owns the sampling fields, the usage and the errors. Ranges are checked by `SamplingParams`, once; but where a
field has another name there, its API checks it, so that the error names what the client wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import Field

from denim.errors import RequestError
from denim.sampling_params import MAX_LOGPROBS, MAX_N, SamplingParams
from denim.server.base_model import ApiModel, Items
from denim.server.structured import ResponseFormat, StructuredOutputs, structured_output

MOST_STOPS, LONGEST_STOP = 64, 1024
"""Stop strings of a request, and their characters: each costs time with every token."""

MOST_STOP_TOKENS = 1024

CacheSalt = Annotated[str, Field(max_length=1024)]
"""It is kept as long as what it keeps apart."""


def ranged(description: str, **limits: float) -> Any:
    """A field that may be left out, with its range for readers of the schema."""
    return Field(default=None, description=description, json_schema_extra=dict(limits))


class SamplingFields(ApiModel):
    """Fields of the OpenAI API and of vLLM that say how tokens are drawn, and Denim's wishes for the prefix
    cache. null is the same as leaving a field out."""

    n: int | None = ranged("Completions of each prompt.", minimum=1, maximum=MAX_N)
    temperature: float | None = ranged("0 takes the likeliest token.", minimum=0)
    top_p: float | None = ranged("The fewest likeliest tokens of so much.", exclusiveMinimum=0, maximum=1)
    top_k: int | None = ranged("So many likeliest tokens; 0 or -1: all.", minimum=-1)
    min_p: float | None = ranged("Tokens of so much of the likeliest one's.", minimum=0, maximum=1)
    presence_penalty: float | None = ranged("On tokens that came.", minimum=-2, maximum=2)
    frequency_penalty: float | None = ranged("On tokens, each time they came.", minimum=-2, maximum=2)
    repetition_penalty: float | None = ranged("1 is neutral.", exclusiveMinimum=0)
    seed: int | None = ranged("The same seed draws the same answer.", minimum=-(2**63), maximum=2**64 - 1)
    stop: str | Items[str] | None = Field(default=None, description="Strings that end the text.")
    stop_token_ids: Items[int] | None = Field(
        default=None, max_length=MOST_STOP_TOKENS, description="Tokens that end it."
    )
    ignore_eos: bool | None = Field(default=None, description="Go on past the model's end tokens.")
    min_tokens: int | None = ranged("No end before so many tokens.", minimum=0)
    logit_bias: dict[str, float] | None = Field(default=None, description="Token id to -100 … 100.")
    skip_special_tokens: bool | None = Field(default=None, description="Default: true.")
    include_stop_str_in_output: bool | None = Field(default=None, description="Default: false.")
    prompt_logprobs: int | None = ranged("Of the prompt; not in streams.", minimum=0, maximum=MAX_LOGPROBS)
    return_token_ids: bool | None = Field(default=None, description="Also answer with token ids.")
    response_format: ResponseFormat | None = Field(
        default=None, discriminator="type", description="JSON, or JSON by a schema."
    )
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="vLLM's: json, regex, choice, grammar, …"
    )
    priority: int | None = Field(default=None, description="Lower goes first.")
    cache_salt: CacheSalt | None = Field(
        default=None, description="Requests of other salts share no prefix with this."
    )
    no_store: bool | None = Field(default=None, description="Leave nothing in the prefix cache.")
    user: str | None = Field(default=None, description="Without effect.")
    metadata: dict[str, Any] | None = Field(default=None, description="Without effect.")

    def sampling(self, **more: Any) -> SamplingParams:
        """Raises RequestError for a value out of range."""
        more["structured"] = structured_output(self.response_format, self.structured_outputs)
        given = self.model_dump(include=_SAMPLING, exclude_none=True)
        if self.logit_bias is not None:
            given["logit_bias"] = {_token(key): bias for key, bias in self.logit_bias.items()}
        return SamplingParams(**given | {"stop": checked_stop("stop", self.stop)} | more)


_SAMPLING = {
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "stop_token_ids", "ignore_eos", "min_tokens"),
    *("skip_special_tokens", "include_stop_str_in_output", "prompt_logprobs"),
}


def _token(key: str) -> int:
    if not key.isascii() or not key.isdecimal() or len(key) > 10:
        raise RequestError(f"logit_bias has the key {key!r}; a key is a token id", "logit_bias")
    return int(key)


def checked_stop(name: str, stop: str | list[str] | None) -> list[str]:
    """Raises RequestError for stop strings that the server does not look for: empty, too long, too many."""
    strings = [stop] if isinstance(stop, str) else stop or []
    if len(strings) > MOST_STOPS or not all(0 < len(text) <= LONGEST_STOP for text in strings):
        raise RequestError(f"{name}: at most {MOST_STOPS} strings of 1 to {LONGEST_STOP} characters", name)
    return strings


def check_tool_choice(required: bool, named: str | None, offered: Sequence[str]) -> None:
    """Raises RequestError where a tool is wanted, any or the one `named`, that is not among those offered."""
    if (required and not offered) or (named is not None and named not in offered):
        raise RequestError(
            f"tool_choice wants {'a tool' if named is None else repr(named)}, and tools has"
            f" {', '.join(offered) or 'none'}; offer it there, or choose otherwise",
            "tool_choice",
        )


class PromptTokensDetails(ApiModel):
    cached_tokens: int


class CompletionTokensDetails(ApiModel):
    reasoning_tokens: int


class Usage(ApiModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int, reasoning: int = 0) -> Usage:
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=reasoning),
        )


class StreamOptions(ApiModel):
    include_usage: bool | None = Field(default=None, description="A last chunk with the usage.")
    continuous_usage_stats: bool | None = Field(default=None, description="The usage so far in every chunk.")
    include_obfuscation: bool | None = Field(default=None, description="Without effect: nothing is padded.")


def usage_so_far(options: StreamOptions | None, usage: Callable[[], Usage]) -> dict[str, Any]:
    """What a chunk says of the usage: the numbers where each is to tell them, null where only the last one
    is, else nothing."""
    if options is not None and options.continuous_usage_stats:
        return {"usage": usage().model_dump()}
    return {"usage": None} if options is not None and options.include_usage else {}


class ErrorDetail(ApiModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ApiModel):
    """Every error of the OpenAI API."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorResponse, "description": "The request is at fault, or comes at a bad time."},
    "5XX": {"model": ErrorResponse, "description": "The server is at fault, or stops."},
}

STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; as server-sent events where `stream` asks for it.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}
