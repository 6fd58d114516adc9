"""Commands that measure, check or look into an engine or a running server.

Owns their options. The work is in `denim.commands`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from denim.cli.exit_codes import OTHER_ERROR
from denim.cli.options import (
    PLAIN_HELP,
    AsJson,
    Device,
    Dtype,
    KvDtype,
    Memory,
    ModelFolder,
    Out,
    Quiet,
    StateDtype,
)


def profile(
    model: ModelFolder = None,
    batch: Annotated[str, typer.Option(help="Decode steps of so many requests: 1,32; empty: none.")] = "1,8",
    context: Annotated[int, typer.Option(help="Tokens behind each of them.")] = 512,
    prompt: Annotated[str, typer.Option(help="Prefills of so many tokens: 1024,8192; empty: none.")] = "512",
    device: Device = "auto",
    dtype: Dtype = "auto",
    state_dtype: StateDtype = "auto",
    memory: Memory = None,
    out: Annotated[Path | None, typer.Option(help="A folder for the picture and the JSON.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Where the time of a step goes, part by part. Beside each the least that it must take."""
    from denim.commands.engine import open_engine
    from denim.commands.profile.report import numbers, refuse_too_long, show_profile
    from denim.spec import embedded_model, read_spec

    batches, prompts = numbers("--batch", batch), numbers("--prompt", prompt)
    numbers("--context", str(context))
    refuse_too_long(batches, context, prompts, read_spec(model or embedded_model()).max_position)
    llm = open_engine(model, device, dtype, state_dtype, memory, quiet)
    show_profile(llm, batches, context, prompts, out, as_json)


def verify(
    model: ModelFolder = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few short prompts a check.")] = False,
    seed: Annotated[int, typer.Option(help="Draws prompts and positions.")] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    state_dtype: StateDtype = "auto",
    kv_dtype: KvDtype = "auto",
    as_json: AsJson = False,
) -> None:
    """Whether answers from the prefix cache are those of a recompute. With this model, on this machine."""
    from denim.commands.verify.report import show_verify

    if not show_verify(model, device, dtype, state_dtype, kv_dtype, seed, quick, as_json):
        raise typer.Exit(OTHER_ERROR)


cache = typer.Typer(help="The prefix cache.", no_args_is_help=True, rich_markup_mode=PLAIN_HELP)


@cache.command("inspect")
def cache_inspect(
    where: Annotated[
        str, typer.Argument(metavar="WHERE", help="URL of `denim serve`, a disk_cache, or a snapshot's JSON.")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(help="Key of the server.", envvar="DENIM_API_KEY")] = None,
    most: Annotated[int, typer.Option(help="Most nodes that are drawn.")] = 100,
    as_json: AsJson = False,
) -> None:
    """The tree of prefixes as it stands. Positions, checkpoints, bytes, hits."""
    from denim.commands.cache_inspect import show_cache

    show_cache(where, api_key, most, as_json)


study = typer.Typer(
    help="Measurements of the method itself. A table, a JSON file and a picture each.",
    no_args_is_help=True,
    rich_markup_mode=PLAIN_HELP,
)


@study.command("chunk-size")
def chunk_size(
    heads: Annotated[int, typer.Option(help="Heads of q, k and v alike.")] = 16,
    dim: Annotated[int, typer.Option(help="Numbers in a head's key, and in its value.")] = 128,
    tokens: Annotated[int, typer.Option(help="Length of the sequence.")] = 2048,
    rounds: Annotated[int, typer.Option(help="Measurements of each chunk size; the median counts.")] = 7,
    device: Device = "auto",
    out: Out = Path(),
    as_json: AsJson = False,
) -> None:
    """The gated delta rule by chunks of 16 to 256 tokens. Time, FLOPs and serial steps."""
    from denim.commands.study.chunk_size import study_chunk_size

    study_chunk_size(heads, dim, tokens, rounds, device, out, as_json)


@study.command()
def precision(
    tokens: Annotated[int, typer.Option(help="Length of the runs whose drift is measured.")] = 8192,
    length: Annotated[int, typer.Option(help="Tokens of a text that denim-tiny reads.")] = 1024,
    windows: Annotated[int, typer.Option(help="How many such texts.")] = 2,
    text: Annotated[
        Path | None, typer.Option(help="A file to cut them from; without it denim-tiny writes them.")
    ] = None,
    device: Device = "auto",
    out: Out = Path(),
    as_json: AsJson = False,
) -> None:
    """What a state loses in bf16, fp8 and int8. Drift against float64, and denim-tiny's perplexity."""
    from denim.commands.study.precision import study_precision

    study_precision(tokens, length, windows, text, device, out, as_json)


bench = typer.Typer(
    help="Measurements of a running server.", no_args_is_help=True, rich_markup_mode=PLAIN_HELP
)


@bench.command("serve")
def bench_serve(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Of any server that speaks the OpenAI API.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the first that the server names.")] = None,
    requests: Annotated[int, typer.Option(help="In all, all turns counted.")] = 100,
    rate: Annotated[
        float, typer.Option(help="Conversations that begin per second, at random; inf: all at once.")
    ] = math.inf,
    burstiness: Annotated[
        float, typer.Option(help="Of --rate; 1: Poisson, less: in bursts, more: evenly.")
    ] = 1.0,
    concurrency: Annotated[int | None, typer.Option(help="Requests in work at once, at most.")] = None,
    prompt: Annotated[str, typer.Option(help="Tokens of what a turn adds: 512, or MEAN,SIGMA.")] = "512",
    output: Annotated[str, typer.Option(help="Tokens of an answer: 128, or MEAN,SIGMA.")] = "128",
    trace: Annotated[
        Path | None, typer.Option(help="Both lengths from a trace instead; see denim plan --trace.")
    ] = None,
    shared_prefix: Annotated[int, typer.Option(help="Tokens of system text that conversations share.")] = 0,
    prefixes: Annotated[int, typer.Option(help="How many such texts there are.")] = 1,
    turns: Annotated[int, typer.Option(help="Requests of one conversation.")] = 1,
    think: Annotated[float, typer.Option(help="Seconds from an answer to the next turn.")] = 0.0,
    goodput: Annotated[
        str | None, typer.Option(help="What a good answer takes, in ms: ttft=500,tpot=50,e2el=5000.")
    ] = None,
    percentiles: Annotated[str, typer.Option(help="To show: 50,90,99.9.")] = "50,90,99",
    extra_body: Annotated[
        str | None, typer.Option(help='More fields of each request, as JSON: {"top_p": 0.9}.')
    ] = None,
    completions: Annotated[
        bool, typer.Option("--completions", help="Ask /v1/completions, not /v1/chat/completions.")
    ] = False,
    api_key: Annotated[
        str | None, typer.Option(help="Sent with each request.", envvar="OPENAI_API_KEY")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the next byte.")] = 600.0,
    seed: Annotated[int, typer.Option(help="The same seed asks the same.")] = 0,
    out: Annotated[Path | None, typer.Option(help="A folder for the JSON and the picture.")] = None,
    as_json: AsJson = False,
) -> None:
    """A server under load. Times to the first token, per token, to the end; throughput and goodput."""
    from denim.commands.bench.figures import parse_goodput, parse_percentiles
    from denim.commands.bench.lengths import read_lengths
    from denim.commands.bench.serve import bench_serve as measure
    from denim.commands.bench.serve import parse_extra_body
    from denim.commands.bench.workload import Wishes

    prompts, outputs = read_lengths(prompt, output, trace)
    wishes = Wishes(
        requests=requests,
        turns=turns,
        prompts=prompts,
        outputs=outputs,
        paired=trace is not None,
        rate=rate,
        burstiness=burstiness,
        think=think,
        shared=shared_prefix,
        prefixes=prefixes,
        seed=seed,
    )
    measure(
        url,
        model,
        wishes,
        chat=not completions,
        key=api_key,
        concurrency=concurrency,
        limits=parse_goodput(goodput),
        percentiles=parse_percentiles(percentiles),
        extra_body=parse_extra_body(extra_body),
        timeout=timeout,
        out=out,
        as_json=as_json,
    )
