"""`denim bench serve`: a run against a server, and its JSON.

Owns the order: meet the server, draw the load, run it, tell. What the numbers mean
`denim.commands.bench.figures` says, and `denim.commands.bench.report` shows them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import Progress

from denim.commands.bench.figures import figures
from denim.commands.bench.report import draw, show
from denim.commands.bench.workload import Drawn, Room, Wishes, draw_sessions
from denim.commands.picture import need_folder, need_matplotlib, write
from denim.errors import ConfigError

try:
    import httpx

    from denim.commands.bench.client import Api, Measured, headers_of
    from denim.commands.bench.load import Server, meet, run
except ImportError as error:
    raise ConfigError(
        f"denim bench needs {error.name}; install it with: pip install 'denim-llm[bench]'"
    ) from error

NAME = "bench-serve"
LONGEST = 1 << 20  # tokens of prompt and answer, for a server that does not say what it takes
OWN_FIELDS = ("model", "messages", "prompt", "stream", "max_tokens")
"""Of a request's body, which the run itself decides."""


def bench_serve(
    url: str,
    model: str | None,
    wishes: Wishes,
    *,
    chat: bool,
    key: str | None,
    concurrency: int | None,
    limits: dict[str, float],
    percentiles: Sequence[float],
    extra_body: dict[str, Any],
    timeout: float,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure the server at `url` and print; with `out` write NAME.json and NAME.png there. `extra_body`:
    more fields of every request.

    Raises ConfigError for a server that does not answer, lengths that it does not take, a folder that cannot
    be made, a package that is missing, and when no request at all was completed.
    """
    if concurrency is not None and concurrency < 1:
        raise ConfigError(f"--concurrency is {concurrency}; it must be at least 1")
    if not timeout > 0:
        raise ConfigError(f"--timeout is {timeout:g}; it must be above 0")
    if out is not None:
        need_matplotlib()
        need_folder(out)
    base_url = base_of(url)

    async def measure() -> tuple[Server, Room, Drawn, list[Measured]]:
        limits_off = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(timeout=timeout, limits=limits_off, trust_env=False) as client:
            name, longest = await named(client, base_url, key, model)
            server = await meet(client, Api(base_url, name, chat, key, extra_body))
            room = Room(longest or LONGEST, server.fixed_tokens or 0)
            drawn = draw_sessions(wishes, server.words_per_token, room)
            with Progress(transient=True, console=Console(stderr=True), disable=as_json) as progress:
                task = progress.add_task("requests", total=wishes.requests)
                measured = await run(
                    client,
                    server.api,
                    drawn.sessions,
                    wishes.think,
                    concurrency,
                    lambda _: progress.advance(task),
                )
            return server, room, drawn, measured

    server, room, drawn, measured = asyncio.run(measure())
    result = {
        **run_of(server, wishes, concurrency),
        "room_tokens": room.tokens,
        "redrawn": drawn.redrawn,
        "ended_early": drawn.ended,
        **figures(measured, limits, server.fixed_tokens is not None, percentiles),
        "measured": [
            {name: value for name, value in asdict(one).items() if name not in ("text", "piece_tokens")}
            for one in measured
        ],
    }
    if out is not None:
        write(out, NAME, result, draw(measured))
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    if not result["completed"]:
        raise ConfigError(
            f"no request was completed: {next(iter(result['errors']))}; ask for less, or look into the"
            " server's log"
        )


def base_of(url: str) -> str:
    """The address under which /chat/completions lies: `url` may end in /v1 or before it. Raises ConfigError
    for a port that cannot be."""
    plain = url.rstrip("/")
    if "://" not in plain:
        plain = f"http://{plain}"
    try:
        urlsplit(plain).port  # noqa: B018 (it is checked when it is read)
    except ValueError as error:
        raise ConfigError(f"URL is {url!r}: {error}; give one such as http://127.0.0.1:8000") from None
    return plain if plain.endswith("/v1") else f"{plain}/v1"


async def named(client: Any, base_url: str, key: str | None, model: str | None) -> tuple[str, int | None]:
    """(`model`, or the first that the server names; tokens that it takes, None where none are said).

    Raises ConfigError where neither names a model.
    """
    try:
        reply = await client.get(f"{base_url}/models", headers=headers_of(key))
        reply.raise_for_status()
        cards = reply.json()["data"]
        card = cards[0] if model is None else next(card for card in cards if card["id"] == model)
        name, longest = str(card["id"]), card.get("max_model_len")  # vLLM's field, which Denim has too
        return name, longest if isinstance(longest, int) and longest > 0 else None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError, StopIteration) as error:
        if model is not None:
            return model, None
        if isinstance(error, httpx.HTTPStatusError):
            refused = error.response.status_code in (401, 403)
            says = f"answers {error.response.status_code} {error.response.reason_phrase}"
            raise ConfigError(
                f"{base_url}/models {says}; give --{'api-key' if refused else 'model'}"
            ) from error
        raise ConfigError(f"{base_url}/models names no model ({error}); give --model") from error


def parse_extra_body(text: str | None) -> dict[str, Any]:
    """A JSON object. Raises ConfigError, also for fields that the run itself decides."""
    try:
        body = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--extra-body is no JSON: {error}; give an object") from error
    if not isinstance(body, dict):
        raise ConfigError(f"--extra-body is {text}; give a JSON object")
    own = [name for name in OWN_FIELDS if name in body]
    if own:
        raise ConfigError(f"--extra-body has {own[0]!r}, which other options decide; leave it out")
    return body


def run_of(server: Server, wishes: Wishes, concurrency: int | None) -> dict[str, Any]:
    """What was run, and against what, as JSON."""
    lengths = {"prompts": wishes.prompts.name, "outputs": wishes.outputs.name}
    rate = {"rate": "inf"} if wishes.rate == float("inf") else {}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "url": server.api.base_url,
        "model": server.api.model,
        "endpoint": "chat" if server.api.chat else "completions",
        "extra_body": dict(server.api.extras),
        "words_per_token": server.words_per_token,
        "template_tokens": server.fixed_tokens,
        "ignores_eos": server.ignores_eos,
        "concurrency": concurrency,
        "workload": {**asdict(wishes), **lengths, **rate},
    }
