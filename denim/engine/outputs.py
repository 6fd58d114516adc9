"""What a request gives back: whole (`RequestOutput`) or piece by piece (`StreamDelta`).

Plain data under vLLM's names. Knows nothing of how any of it came about.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from denim.runner.logprobs import TokenLogprobs


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one token (nats), its rank (1: the likeliest), and its text (None: no tokenizer)."""

    logprob: float
    rank: int
    decoded_token: str | None


def logprobs_by_token(report: TokenLogprobs, decode: Callable[[int], str] | None) -> dict[int, Logprob]:
    """vLLM's form of a report: the token itself first, then the likeliest ones in order."""
    entries = [(report.token, report.logprob, report.rank)]
    ranks = range(1, len(report.top_ids) + 1)
    entries += zip(report.top_ids, report.top_logprobs, ranks, strict=True)
    by_token: dict[int, Logprob] = {}
    for token, logprob, rank in entries:
        if token not in by_token:
            by_token[token] = Logprob(logprob, rank, decode(token) if decode else None)
    return by_token


def _shown(record: object, fields: dict[str, object]) -> str:
    """A record as dataclasses show theirs."""
    return f"{type(record).__name__}({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


@dataclass
class RequestMetrics:
    """Times of one request, in seconds of the engine's clock; None: not reached."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass
class CompletionOutput:
    """One completion. Logprobs are there if they were asked for.

    `finish_reason`: "stop", "length", "abort" or "error"; None while it runs. `stop_reason`: the stop
    string or the stop token that was met; None for the model's own end tokens. `token_ids` holds every
    token that was drawn, the last one too, whether or not its text is part of `text`. The text comes in
    `pieces` and is put together when it is read, since a string that grows is copied with every token.
    """

    index: int
    pieces: list[str] = field(default_factory=list, compare=False)
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def __repr__(self) -> str:
        shown = {"index": self.index, "text": self.text} | vars(self)
        del shown["pieces"]
        return _shown(self, shown)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """One request with its completions, in the order of their index.

    `prompt` is None where the prompt came as tokens, which are packed in `prompt_ids`. `prompt_logprobs` has
    one entry a prompt token, the first of which is None. `num_cached_tokens`: prompt tokens that were not
    computed again.
    """

    request_id: str
    prompt: str | None
    prompt_ids: array[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @cached_property
    def prompt_token_ids(self) -> list[int]:
        return self.prompt_ids.tolist()

    def __repr__(self) -> str:
        shown = vars(self) | {"prompt_token_ids": self.prompt_token_ids}
        del shown["prompt_ids"]
        return _shown(self, shown)


class StreamDelta(NamedTuple):
    """What one step adds to completion `index` of a request.

    A reader who was slow gets what several steps added as one. `text` may be empty: a character is not whole
    yet, or a stop string may be coming. The last delta of a completion has a finish_reason; the texts of all
    of them joined are `CompletionOutput.text`.
    `num_cached_tokens` is the request's. `prompt_logprobs` (see `RequestOutput`) come with the first token of
    completion 0, where they were asked for.
    """

    request_id: str
    index: int  # type: ignore[assignment]  # not tuple's method
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
