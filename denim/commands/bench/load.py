"""A run: conversations sent at their times, and what their clients saw.

Owns the clock of the run, the limit on requests in work, and what is learnt of a server before it is
measured.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import httpx

from denim.commands.bench.client import Api, Measured, ask
from denim.commands.bench.workload import Session, text_of
from denim.errors import ConfigError

WORDS_PER_TOKEN = 0.75
"""Of English text, where the server does not count: OpenAI's rule of thumb."""

FEW, MANY = 100, 400  # words of the two prompts by which the server's tokenizer is measured

# What is asked for beyond the standard, most wanted first; a server that refuses gets the next one.
EXTRAS: tuple[dict[str, object], ...] = (
    {"ignore_eos": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"ignore_eos": True, "stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True}},
    {},
)


REFUSALS = ("status 400", "status 422")
"""How an error begins that may be a field's fault."""


class Server(NamedTuple):
    """What a server was found to be. `fixed_tokens`: what its template adds to a prompt, None where it does
    not count tokens. `ignores_eos`: answers have the length that was asked for."""

    api: Api
    words_per_token: float
    fixed_tokens: int | None
    ignores_eos: bool


async def meet(client: httpx.AsyncClient, api: Api) -> Server:
    """Ask twice, to learn what the server accepts and how it counts. Raises ConfigError when it does not
    answer."""
    draw = random.Random(0)
    for extras in EXTRAS:
        asked = replace(api, extras={**extras, **api.extras})
        few, many = [await _try(client, asked, text_of(n, 1, draw)) for n in (FEW, MANY)]
        error = few.error or many.error
        if error is None or not error.startswith(REFUSALS):
            break
    if error is not None:
        raise ConfigError(
            f"{api.base_url} cannot be measured with model {api.model!r}: {error}; give the URL of a server"
            " that runs, and a --model that it has"
        )
    ignores = bool(asked.extras.get("ignore_eos"))
    if few.prompt_tokens is None or many.prompt_tokens is None:
        return Server(asked, WORDS_PER_TOKEN, None, ignores)
    tokens_per_word = (many.prompt_tokens - few.prompt_tokens) / (MANY - FEW)
    if tokens_per_word <= 0:
        raise ConfigError(
            f"{api.base_url} counts {few.prompt_tokens} tokens in {FEW} words and {many.prompt_tokens} in "
            f"{MANY}; lengths cannot be asked for there; measure a server that counts by the text"
        )
    fixed = max(0, round(few.prompt_tokens - FEW * tokens_per_word))
    return Server(asked, 1 / tokens_per_word, fixed, ignores)


async def _try(client: httpx.AsyncClient, api: Api, text: str) -> Measured:
    return await ask(client, api, [{"role": "user", "content": text}], 2, time.perf_counter())


async def run(
    client: httpx.AsyncClient,
    api: Api,
    sessions: Sequence[Session],
    think: float,
    concurrency: int | None,
    done: Callable[[Measured], None],
) -> list[Measured]:
    """All requests of all sessions; `done` is called with each as it ends. A conversation whose request fails
    goes no further. `concurrency`: requests in work at once; beyond it they wait here, unmeasured."""
    begun = time.perf_counter()
    limit = nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)

    async def converse(number: int, session: Session) -> list[Measured]:
        await asyncio.sleep(max(0.0, session.start - (time.perf_counter() - begun)))
        messages = [{"role": "system", "content": session.system}] if session.system else []
        found: list[Measured] = []
        for at, turn in enumerate(session.turns):
            if at and think:
                await asyncio.sleep(think)
            messages.append({"role": "user", "content": turn.text})
            async with limit:
                one = await ask(client, api, messages, turn.output_tokens, begun, number, at)
            found.append(one)
            done(one)
            if one.error is not None:
                break
            messages.append({"role": "assistant", "content": one.text})
        return found

    found = await asyncio.gather(*(converse(n, session) for n, session in enumerate(sessions)))
    return [one for session in found for one in session]
