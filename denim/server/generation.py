"""The prompts of one API request on their way through the engine.

Owns the order: a place in the gate, the engine, the counting; and the end of it when the reader leaves.
Knows nothing of what an API makes of the deltas.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

from denim.engine.outputs import StreamDelta
from denim.engine.prompts import ReadPrompt
from denim.sampling_params import SamplingParams
from denim.server.errors import ApiError
from denim.server.limits import Place
from denim.server.record import RequestRecord
from denim.server.serving import Serving


@dataclass(frozen=True)
class Job:
    """What a request wants of the engine. Every prompt gets `params.n` completions. `prompt_field`: the field
    of the request that holds the prompt."""

    prompts: Sequence[ReadPrompt]
    params: SamplingParams
    priority: int
    cache_salt: str | None
    no_store: bool
    cache_control: Sequence[int] = ()
    prompt_field: str = "prompt"


class ChoiceDelta(NamedTuple):
    """A delta of choice `choice`: the completions of the first prompt come first."""

    choice: int
    delta: StreamDelta


async def generate(serving: Serving, record: RequestRecord, job: Job) -> AsyncGenerator[ChoiceDelta]:
    """The deltas of all choices as they come.

    Raises ApiError when the server is full, when the engine refuses the request, or when a choice ends for a
    reason that is no answer.
    """
    _check_lengths(serving, job)
    record.prompts = len(job.prompts)
    record.prompt_tokens = sum(len(prompt.ids) for prompt in job.prompts)
    last: dict[int, float] = {}  # when a choice had its last token
    cached: dict[int, int] = {}  # by prompt
    with serving.gate.enter(len(job.prompts) * job.params.n) as places:
        if job.params.structured is not None:
            await serving.trial.check(job.params.structured)
        streams = [_stream(serving, job, prompt) for prompt in job.prompts]
        async with aclosing(_merged(streams)) as deltas:
            async for at, delta in deltas:
                choice = at * job.params.n + delta.index
                if delta.token_ids:
                    _note_tokens(serving, record, places[choice], last, choice, len(delta.token_ids))
                if at not in cached:
                    cached[at] = delta.num_cached_tokens
                    record.cached_tokens = sum(cached.values())
                if delta.finish_reason is not None:
                    record.finish_reasons[delta.finish_reason] += 1
                    _check_end(delta.finish_reason)
                yield ChoiceDelta(choice, delta)


def _check_lengths(serving: Serving, job: Job) -> None:
    limit = serving.options.max_prompt_tokens
    longest = max((len(prompt.ids) for prompt in job.prompts), default=0)
    if limit is not None and longest > limit:
        raise ApiError(
            400,
            f"the prompt has {longest:,} tokens; max_prompt_tokens={limit} allows no more; shorten it",
            param=job.prompt_field,
            code="context_length_exceeded",
        )


async def _stream(serving: Serving, job: Job, prompt: ReadPrompt) -> AsyncGenerator[StreamDelta]:
    """The engine's deltas for one prompt."""
    reply = await serving.engine.submit(
        prompt,
        job.params,
        uuid.uuid4().hex,
        priority=job.priority,
        cache_salt=job.cache_salt,
        cache_control=job.cache_control,
        no_store=job.no_store,
    )
    async with reply as stream:
        async for delta in stream:
            yield delta


def _note_tokens(
    serving: Serving, record: RequestRecord, place: Place, last: dict[int, float], choice: int, tokens: int
) -> None:
    now = time.monotonic()
    record.completion_tokens += tokens
    serving.metrics.note_generated(tokens)
    if choice in last:
        serving.metrics.inter_token.observe((now - last[choice]) / tokens)
    else:
        place.note_token()
        if record.first_token is None:
            record.first_token = now
            serving.metrics.first_token.observe(now - record.started)
    last[choice] = now


def _check_end(finish_reason: str) -> None:
    if finish_reason == "error":
        raise ApiError(500, "the engine failed on this request; the server's log says why")
    if finish_reason == "abort":
        raise ApiError(
            503, "the request was ended by the server; send it again", headers={"retry-after": "5"}
        )


async def _merged(
    streams: Sequence[AsyncGenerator[StreamDelta]],
) -> AsyncGenerator[tuple[int, StreamDelta]]:
    """What all streams bring, with the number of the stream. The first error ends all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for delta in only:
                yield 0, delta
        return
    # One at a time: what nobody has taken yet waits in the streams, which join it.
    arrived: asyncio.Queue[tuple[int, StreamDelta] | Exception | None] = asyncio.Queue(1)

    async def pump(number: int, stream: AsyncGenerator[StreamDelta]) -> None:
        try:
            async with aclosing(stream) as source:
                async for delta in source:
                    await arrived.put((number, delta))
        except Exception as error:
            await arrived.put(error)
        else:
            await arrived.put(None)

    tasks = [asyncio.ensure_future(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
