"""Log-probabilities in the two forms of the OpenAI API.

Owns the forms. What the engine reports of a token is a mapping whose first entry is the token itself, the
others being the likeliest in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from denim.engine.outputs import Logprob
from denim.server.base_model import ApiModel

LEAST = -9999.0
"""For minus infinity, which JSON does not have; the OpenAI API's own number for it."""

Report = Mapping[int, Logprob]
BytesOf = Callable[[int], bytes]


class TopLogprob(ApiModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ApiModel):
    content: list[TokenLogprob]
    refusal: None = None


class PromptLogprob(ApiModel):
    """vLLM's form of an entry."""

    logprob: float
    rank: int
    decoded_token: str | None


def prompt_logprobs(reports: Sequence[Report | None]) -> list[dict[int, PromptLogprob] | None]:
    """Of every token of a prompt by token id, as vLLM has them; None for the first one."""
    return [
        None if report is None else {token: _by_id(entry) for token, entry in report.items()}
        for report in reports
    ]


def _by_id(entry: Logprob) -> PromptLogprob:
    logprob = max(entry.logprob, LEAST)
    return PromptLogprob(logprob=logprob, rank=entry.rank, decoded_token=entry.decoded_token)


class CompletionLogprobs(ApiModel):
    """`text_offset`: characters of `tokens` before each, as in vLLM. That is its place in the text, but
    behind a character of several tokens, each of which shows a replacement character."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


def chat_logprobs(reports: Sequence[Report], top: int, bytes_of: BytesOf) -> ChatLogprobs:
    """`top`: how many of the likeliest tokens to name. `bytes_of`: a token's bytes."""
    content = []
    for report in reports:
        entries = [_entry(token, entry, bytes_of) for token, entry in report.items()]
        likeliest = sorted(zip(report.values(), entries, strict=True), key=lambda pair: pair[0].rank)
        named = [entry for logprob, entry in likeliest if logprob.rank <= top]
        content.append(TokenLogprob(**entries[0].model_dump(), top_logprobs=named))
    return ChatLogprobs(content=content)


def completion_logprobs(
    tokens: Sequence[int],
    reports: Sequence[Report | None],
    top: int,
    offset: int,
    decode: Callable[[int], str] | None,
) -> CompletionLogprobs:
    """`offset`: characters of the tokens before the first of these. A report of None is that of a prompt's
    first token, which follows nothing; `decode` names it."""
    result = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for token, report in zip(tokens, reports, strict=True):
        own = None if report is None else report[token]
        text = _text(token, own or Logprob(0.0, 1, decode(token) if decode else None))
        result.text_offset.append(offset)
        result.tokens.append(text)
        result.token_logprobs.append(None if own is None else max(own.logprob, LEAST))
        result.top_logprobs.append(None if report is None else _by_text(report, top))
        offset += len(text)
    return result


def _by_text(report: Report, top: int) -> dict[str, float]:
    """The token itself is among them, as in vLLM."""
    first = next(iter(report))
    return {
        _text(token, entry): max(entry.logprob, LEAST)
        for token, entry in report.items()
        if entry.rank <= top or token == first
    }


def _entry(token: int, entry: Logprob, bytes_of: BytesOf) -> TopLogprob:
    logprob = max(entry.logprob, LEAST)
    return TopLogprob(token=_text(token, entry), logprob=logprob, bytes=list(bytes_of(token)))


def _text(token: int, entry: Logprob) -> str:
    """A model without a tokenizer names tokens by their ids, as vLLM does where it is asked to."""
    return f"token_id:{token}" if entry.decoded_token is None else entry.decoded_token
