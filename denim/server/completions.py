"""`/v1/completions`: text behind a prompt.

Owns the way from a body to a job, and from deltas to choices, whole or in chunks.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request, Response

from denim.engine.outputs import StreamDelta
from denim.engine.prompts import ReadPrompt
from denim.errors import RequestError
from denim.server.attention import attended
from denim.server.base_model import json_response
from denim.server.completion_schema import (
    Completion,
    CompletionChoice,
    CompletionRequest,
    Prompt,
)
from denim.server.generation import Job, generate
from denim.server.json_body import JsonRoute
from denim.server.logprobs import Report, completion_logprobs, prompt_logprobs
from denim.server.record import RequestRecord, record_of
from denim.server.schema import ERRORS, STREAMED, Usage, usage_so_far
from denim.server.serving import Serving, serving_of
from denim.server.streaming import DONE, event, event_stream

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"], responses=ERRORS)


@router.post("/v1/completions", response_model=Completion, responses=STREAMED)
async def complete(body: CompletionRequest, request: Request) -> Response:
    """Go on with a prompt."""
    serving, record = serving_of(request), record_of(request)
    model = record.model = serving.model_named(body.model)
    body.check()
    params = body.params()
    batch = _each(body.prompt)
    serving.gate.check(len(batch) * params.n)  # before time is spent on prompts
    prompts = [await _read(serving, prompt, field) for field, prompt in batch.items()]
    job = Job(
        prompts,
        params,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        cache_control=body.cache_control or (),
        no_store=bool(body.no_store),
    )
    answer = _Answer(serving, record, body, job, f"cmpl-{record.request_id}", model)
    if body.stream:
        return await event_stream(request, answer.events())
    return await attended(answer.whole(), request.receive, record, serving.options)


def _each(prompt: Prompt) -> dict[str, str | list[int]]:
    """The prompts of a batch, also of one, by where they stand in the body."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if not prompt:
        raise RequestError("prompt is an empty list; give at least one prompt", "prompt")
    batch: Sequence[Any] = prompt
    alone = isinstance(batch[0], int)
    return {"prompt": list(batch)} if alone else {f"prompt.{at}": one for at, one in enumerate(batch)}


async def _read(serving: Serving, prompt: str | list[int], field: str) -> ReadPrompt:
    try:
        return await serving.engine.read(prompt)
    except RequestError as error:
        error.param = error.param or field
        raise


@dataclass
class _Choice:
    """One choice as far as it has come. `offset`: characters of the tokens that a stream has told."""

    index: int
    prompt: ReadPrompt
    offset: int = 0
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def take(self, delta: StreamDelta) -> None:
        self.text += delta.text
        self.tokens += delta.token_ids
        self.reports += delta.logprobs or ()
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class _Answer:
    """The answer to one request."""

    def __init__(
        self, serving: Serving, record: RequestRecord, body: CompletionRequest, job: Job, id_: str, model: str
    ) -> None:
        self._serving = serving
        self._record = record
        self._body = body
        self._job = job
        self._head: dict[str, Any] = {
            "id": id_,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._choices = [
            _Choice(at * job.params.n + i, prompt)
            for at, prompt in enumerate(job.prompts)
            for i in range(job.params.n)
        ]
        tokenizer = serving.engine.tokenizer
        self._decode = None if tokenizer is None else tokenizer.decode_one
        self._prompt_scores: dict[int, list[Report | None]] = {}

    async def whole(self) -> Response:
        async with aclosing(generate(self._serving, self._record, self._job)) as deltas:
            async for at, delta in deltas:
                self._choices[at].take(delta)
                if delta.prompt_logprobs is not None:
                    self._prompt_scores[at // self._job.params.n] = list(delta.prompt_logprobs)
        completion = Completion(
            **self._head, choices=[self._shown(choice) for choice in self._choices], usage=self._usage()
        )
        return json_response(completion)

    def _shown(self, choice: _Choice) -> CompletionChoice:
        """A whole choice."""
        body = self._body
        tokens, text, reports = choice.tokens, choice.text, list[Report | None](choice.reports)
        scores = self._prompt_scores.get(choice.index // self._job.params.n, [])
        if body.scores_only:
            tokens, text, reports = [], "", []
        logprobs = None
        if body.echo:
            text = self._echo(choice) + text
            if body.logprobs is not None:
                tokens, reports = [*choice.prompt.tokens, *tokens], [*scores, *reports]
        if body.logprobs is not None:
            logprobs = completion_logprobs(tokens, reports, body.logprobs, 0, self._decode)
        ids = body.return_token_ids
        return CompletionChoice(
            index=choice.index,
            text=text,
            logprobs=logprobs,
            finish_reason="length" if body.scores_only else choice.finish_reason,  # type: ignore[arg-type]
            stop_reason=choice.stop_reason,
            prompt_logprobs=prompt_logprobs(scores) if body.prompt_logprobs is not None else None,
            prompt_token_ids=choice.prompt.tokens if ids else None,
            token_ids=choice.tokens if ids and not body.scores_only else None,
        )

    def _echo(self, choice: _Choice) -> str:
        prompt, tokenizer = choice.prompt, self._serving.engine.tokenizer
        if prompt.text is not None:
            return prompt.text
        return "" if tokenizer is None else tokenizer.decode(prompt.tokens, skip_special_tokens=False)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Chunks: of every choice an echo first, if it is wanted."""
        body = self._body
        options = body.stream_options
        echoed = set()
        async with aclosing(generate(self._serving, self._record, self._job)) as deltas:
            async for at, delta in deltas:
                choice = self._choices[at]
                choice.take(delta)
                if body.echo and at not in echoed:
                    echoed.add(at)
                    choice.text = self._echo(choice) + ("" if body.scores_only else choice.text)
                elif not (choice.text or choice.finish_reason):
                    continue
                usage = usage_so_far(options, self._usage)
                yield event(self._chunk([self._piece(choice)], usage))
        if options is not None and options.include_usage:
            yield event(self._chunk([], {"usage": self._usage().model_dump()}))
        yield DONE

    def _piece(self, choice: _Choice) -> dict[str, Any]:
        """What has come of a choice since its last chunk."""
        body = self._body
        piece: dict[str, Any] = {
            "index": choice.index,
            "text": choice.text,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
        }
        if body.logprobs is not None and not body.scores_only:
            logprobs = completion_logprobs(
                choice.tokens, choice.reports, body.logprobs, choice.offset, self._decode
            )
            piece["logprobs"] = logprobs.model_dump()
            choice.offset += sum(map(len, logprobs.tokens))
        if choice.finish_reason is not None:
            piece["stop_reason"] = choice.stop_reason
        if body.return_token_ids:
            piece["token_ids"] = choice.tokens
        choice.text, choice.tokens, choice.reports = "", [], []
        return piece

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return self._head | {"choices": choices} | usage

    def _usage(self) -> Usage:
        record = self._record
        completion = 0 if self._body.scores_only else record.completion_tokens
        return Usage.of(record.prompt_tokens, completion, record.cached_tokens)
