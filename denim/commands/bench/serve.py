"""`denim bench serve`: a run against a server, its table, its JSON and its picture.

Owns the options and what is shown. What the numbers mean `denim.commands.bench.figures` says.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from denim.commands.bench.figures import PERCENTILES, figures, first_token, per_token, whole_answer
from denim.commands.bench.workload import Wishes, sessions_of
from denim.commands.picture import need_folder, need_matplotlib, new_figure, write
from denim.errors import ConfigError
from denim.ledger.units import seconds_text

try:
    import httpx

    from denim.commands.bench.client import Api, Measured, headers_of
    from denim.commands.bench.load import Server, meet, run
except ImportError as error:
    raise ConfigError(
        f"denim bench needs {error.name}; install it with: pip install 'denim-llm[bench]'"
    ) from error

NAME = "bench-serve"
LONGEST = 1 << 20  # tokens of a prompt on average, for a server that does not say what it takes
ROWS = (
    ("first_token", "first token"),
    ("per_token", "per token after it"),
    ("between_pieces", "between two pieces"),
    ("whole_answer", "whole answer"),
)
BINS = 60  # of the run's time in the picture
INDIGO, COPPER = "#2f4b8f", "#b45a1f"  # the colours of Denim's pages


def bench_serve(
    url: str,
    model: str | None,
    wishes: Wishes,
    *,
    chat: bool,
    key: str | None,
    concurrency: int | None,
    limits: dict[str, float],
    timeout: float,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure the server at `url` and print; with `out` write NAME.json and NAME.png there.

    Raises ConfigError for a server that does not answer, a folder that cannot be made, a package that is
    missing, and when no request at all was completed.
    """
    if concurrency is not None and concurrency < 1:
        raise ConfigError(f"--concurrency is {concurrency}; it must be at least 1")
    if not timeout > 0:
        raise ConfigError(f"--timeout is {timeout:g}; it must be above 0")
    if out is not None:
        need_matplotlib()
        need_folder(out)
    base_url = base_of(url)

    async def measure() -> tuple[Server, list[Measured]]:
        limits_off = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(timeout=timeout, limits=limits_off, trust_env=False) as client:
            name, longest = await named(client, base_url, key, model)
            refuse_too_long(wishes, base_url, longest)
            server = await meet(client, Api(base_url, name, chat, key))
            sessions = sessions_of(wishes, server.words_per_token)
            with Progress(transient=True, console=Console(stderr=True), disable=as_json) as progress:
                task = progress.add_task("requests", total=wishes.requests)
                measured = await run(
                    client, server.api, sessions, wishes.think, concurrency, lambda _: progress.advance(task)
                )
            return server, measured

    server, measured = asyncio.run(measure())
    result = result_of(server, measured, wishes, concurrency, limits)
    if out is not None:
        write(out, NAME, result, draw(measured))
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    if not result["completed"]:
        raise ConfigError(f"no request was completed: {next(iter(result['errors']))}")


def base_of(url: str) -> str:
    """The address under which /chat/completions lies: `url` may end in /v1 or before it."""
    plain = url.rstrip("/")
    if "://" not in plain:
        plain = f"http://{plain}"
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
        raise ConfigError(f"{base_url}/models names no model ({error}); give --model") from error


def refuse_too_long(wishes: Wishes, base_url: str, longest: int | None) -> None:
    """Raises ConfigError where the mean prompt is beyond `longest` tokens (None: not known, LONGEST), whose
    text would take long to make and be refused. Of a distribution single requests may be too long; they fail.
    """
    mean = wishes.prompts.mean_tokens + wishes.shared
    if mean <= (longest or LONGEST):
        return
    says = f"{base_url} takes at most {longest:,}" if longest else f"at most {LONGEST:,} are asked for"
    raise ConfigError(
        f"prompts ({wishes.prompts.name}) and --shared-prefix make {mean:,.0f} tokens on average; {says}; "
        "give shorter ones"
    )


def result_of(
    server: Server,
    measured: Sequence[Measured],
    wishes: Wishes,
    concurrency: int | None,
    limits: dict[str, float],
) -> dict[str, Any]:
    """What is written as JSON: the run, the server, the numbers, and every request without its text."""
    lengths = {"prompts": wishes.prompts.name, "outputs": wishes.outputs.name}
    rate = {"rate": "inf"} if wishes.rate == float("inf") else {}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "url": server.api.base_url,
        "model": server.api.model,
        "endpoint": "chat" if server.api.chat else "completions",
        "words_per_token": server.words_per_token,
        "template_tokens": server.fixed_tokens,
        "ignores_eos": server.ignores_eos,
        "concurrency": concurrency,
        "workload": {**asdict(wishes), **lengths, **rate},
        **figures(measured, limits, server.fixed_tokens is not None),
        "measured": [
            {name: value for name, value in asdict(one).items() if name not in ("text", "piece_tokens")}
            for one in measured
        ],
    }


def show(result: dict[str, Any]) -> None:
    """The table and the sentences around it."""
    console = Console(highlight=False)
    work = result["workload"]
    arrivals = "all at once" if work["rate"] == "inf" else f"{work['rate']:g} conversations/s"
    if result["concurrency"]:
        arrivals += f", at most {result['concurrency']} in work"
    console.print(
        f"[bold]{result['model']}[/] at {result['url']} ({result['endpoint']}): {result['completed']:,} of "
        f"{result['requests']:,} requests in {result['seconds']:.1f} s; {arrivals}; prompts {work['prompts']}"
        f", answers {work['outputs']}"
        + (f"; {work['prefixes']} shared prefixes of {work['shared']:,} tokens" if work["shared"] else ""),
        soft_wrap=True,
    )
    grid = Table(box=SIMPLE_HEAD)
    grid.add_column("")
    for heading in ("mean", *(f"p{p}" for p in PERCENTILES), "max"):
        grid.add_column(heading, justify="right")
    for key, label in ROWS:
        if result[key]:
            grid.add_row(label, *(seconds_text(value) for value in result[key].values()))
    console.print(grid)
    for line in sentences(result):
        console.print(line, soft_wrap=True)
    if len(result["turns"]) > 1:
        console.print(turns_table(result["turns"]))


def sentences(result: dict[str, Any]) -> list[str]:
    """Throughput, goodput, and whatever a reader must know of this run."""
    lines = []
    if result["requests_per_second"]:
        unit = result["output_tokens_are"]
        line = (
            f"{result['requests_per_second']:.3g} requests/s, "
            f"{result['output_tokens_per_second']:,.0f} output {unit}/s"
        )
        if result["prompt_tokens"]:
            share = result["cached_tokens"] / result["prompt_tokens"]
            line += f", {result['prompt_tokens_per_second']:,.0f} prompt tokens/s, {share:.1%} of them cached"
        lines.append(line)
    if goodput := result["goodput"]:
        limits = ", ".join(
            f"{name} ≤ {seconds_text(limit)}" for name, limit in goodput["limits_seconds"].items()
        )
        rate = goodput["requests_per_second"] or 0.0
        lines.append(f"goodput ({limits}): {rate:.3g} requests/s, {goodput['share']:.1%} of all")
    if not result["ignores_eos"]:
        lines.append("the server refuses ignore_eos: answers may be shorter than asked for")
    if result["output_tokens_are"] == "pieces":
        lines.append("the server counts no tokens: output is counted in pieces, prompts by words")
    lines += [f"[red]{count:,} failed[/]: {error}" for error, count in result["errors"].items()]
    return lines


def turns_table(turns: Sequence[dict[str, Any]]) -> Table:
    grid = Table(box=SIMPLE_HEAD)
    for heading in ("turn", "requests", "prompt tokens", "cached", "first token, median"):
        grid.add_column(heading, justify="right")
    for row in turns:
        grid.add_row(
            str(row["turn"]),
            f"{row['requests']:,}",
            f"{row['mean_prompt_tokens']:,.0f}",
            f"{row['mean_cached_tokens']:,.0f}",
            seconds_text(row["median_first_token"]),
        )
    return grid


def draw(measured: Sequence[Measured]) -> Any:
    """How the times are spread, and the run along its time."""
    import numpy as np

    good = [one for one in measured if one.error is None]
    figure, axes = new_figure(4)
    spreads = (
        ("to the first token, ms", [first_token(one) for one in good]),
        ("per token after it, ms", [value for one in good for value in per_token(one)]),
        ("whole answer, ms", [whole_answer(one) for one in good]),
    )
    for axis, (label, values) in zip(axes, spreads, strict=False):
        ordered = np.sort(np.array(values)) * 1000
        axis.step(ordered, np.arange(1, len(ordered) + 1) / max(1, len(ordered)), where="post", color=INDIGO)
        axis.set(xlabel=label, ylabel="share", ylim=(0, 1.02))
        axis.grid(alpha=0.3)
    end = max((one.ended for one in measured), default=1.0)
    edges = np.linspace(0, end, BINS + 1)
    pieces = np.histogram([at for one in good for at in one.pieces], edges)[0] / (end / BINS)
    in_work = [sum(one.sent <= at < one.ended for one in measured) for at in edges[:-1]]
    axes[3].step(edges[:-1], pieces, where="post", color=INDIGO)
    beside = axes[3].twinx()
    beside.step(edges[:-1], in_work, where="post", color=COPPER)
    axes[3].set(xlabel="seconds of the run", ylim=(0, None))
    axes[3].set_ylabel("pieces per second", color=INDIGO)
    beside.set(ylim=(0, None))
    beside.set_ylabel("requests in work", color=COPPER)
    return figure
