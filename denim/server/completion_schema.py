"""Bodies of `/v1/completions`, as the OpenAI API and vLLM have them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from denim.errors import RequestError
from denim.sampling_params import MAX_LOGPROBS, SamplingParams
from denim.server.base_model import ApiModel, Items
from denim.server.logprobs import CompletionLogprobs, PromptLogprob
from denim.server.schema import SamplingFields, StreamOptions, Usage, ranged

DEFAULT_MAX_TOKENS = 16  # the API's

MOST_POSITIONS = 1024
"""Of `cache_control`: each may cost a checkpoint."""

Prompt = str | Items[int] | Items[str] | Items[Items[int]]


class CompletionRequest(SamplingFields):
    """A prompt, or a batch of prompts, as text or token ids."""

    model: str | None = None
    prompt: Prompt
    max_tokens: int | None = ranged("Default: 16. 0 with echo: only the prompt is scored.", minimum=0)
    logprobs: int | None = ranged("Of so many likeliest tokens.", minimum=0, maximum=MAX_LOGPROBS)
    echo: bool | None = Field(default=None, description="The prompt is part of the text.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_control: Items[int] | None = Field(
        default=None,
        max_length=MOST_POSITIONS,
        description="Positions in the prompt, in tokens, after which the prefix cache should save.",
    )
    best_of: Annotated[int | None, Field(description="Refused: ask for n completions.")] = None
    suffix: Annotated[str | None, Field(description="Refused: no served model fills in the middle.")] = None

    def check(self) -> None:
        """Refuse what cannot be served. Raises RequestError."""
        if self.best_of not in (None, 1):
            raise RequestError("best_of is not served; ask for n completions and choose yourself", "best_of")
        if self.suffix:
            raise RequestError(
                "suffix is not served: no served model fills in the middle; leave it out", "suffix"
            )
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options is for stream=true only; leave out the one or set the other", "stream_options"
            )
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs are not sent in streams; leave out one of the two", "prompt_logprobs"
            )
        if self.stream and self.echo and self.logprobs is not None:
            raise RequestError(
                "logprobs of an echoed prompt are not sent in streams; leave out stream, echo or logprobs",
                "logprobs",
            )
        if self.max_tokens == 0 and not self.echo:
            raise RequestError(
                "max_tokens=0 needs echo=true; without it there is nothing to answer", "max_tokens"
            )

    @property
    def scores_only(self) -> bool:
        """Whether only the prompt is wanted back; one token is drawn all the same, and not shown."""
        return self.max_tokens == 0

    def params(self) -> SamplingParams:
        """Raises RequestError."""
        scored = self.prompt_logprobs
        if self.echo and self.logprobs is not None and scored is None:
            scored = self.logprobs
        most = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return self.sampling(
            max_tokens=1 if self.scores_only else most, logprobs=self.logprobs, prompt_logprobs=scored
        )


class CompletionChoice(ApiModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(ApiModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
