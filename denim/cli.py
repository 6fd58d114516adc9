"""The command `denim`.

Owns the names and options of the commands, and the way in which errors leave: one line on stderr and an
exit code (2: bad input, 3: it does not fit, 1: anything else that Denim raises on purpose). The work is in
`denim.commands`, imported when a command runs, so that light commands stay quick.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import denim
from denim.errors import CapacityError, ConfigError, DenimError, RequestError

COMPLETION_TOKENS = 256
"""Most tokens of `denim generate` where nothing is said; a chat answer may fill the context."""

BAD_INPUT, TOO_LARGE, OTHER_ERROR, INTERRUPTED = 2, 3, 1, 130

app = typer.Typer(
    name="denim",
    help="An inference engine for hybrid linear-attention language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ModelFolder = Annotated[
    Path | None, typer.Argument(metavar="MODEL", help="A model folder; without it the embedded denim-tiny.")
]
ConfigOrModel = Annotated[
    Path | None,
    typer.Argument(
        metavar="CONFIG_OR_MODEL",
        help="A config.json, a model folder, or a name such as Qwen3.5-0.8B; default: denim-tiny.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]
Model = Annotated[Path | None, typer.Option("--model", "-m", help="A model folder; default: denim-tiny.")]
Dtype = Annotated[str, typer.Option(help="Of weights and activations; auto: the config's.")]
StateDtype = Annotated[str, typer.Option(help="Of recurrent states; auto: the config's, or float32.")]
KvDtype = Annotated[str, typer.Option(help="Of KV; auto: that of the weights.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")]
Memory = Annotated[
    str | None, typer.Option(help="For states and KV: 8GiB, 512MiB, or a fraction of the device: 0.5.")
]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", "-n", help="Most tokens of an answer.")]
Temperature = Annotated[
    float | None, typer.Option(help="0: always the likeliest token. Default: the model's.")
]
TopP = Annotated[float | None, typer.Option(help="Draw from the likeliest tokens of this total probability.")]
TopK = Annotated[int | None, typer.Option(help="Draw from so many likeliest tokens; 0: all.")]
Seed = Annotated[int | None, typer.Option(help="The same seed draws the same answer.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No start-up line; warnings only.")]
Out = Annotated[Path, typer.Option(help="The folder that the PNG and the JSON go to.")]


@app.command()
def ledger(
    model: ConfigOrModel = None,
    lengths: Annotated[str | None, typer.Option(help="Lengths of the table: 512,1024,…")] = None,
    dtype: Dtype = "auto",
    state_dtype: StateDtype = "auto",
    kv_dtype: KvDtype = "auto",
    as_json: AsJson = False,
) -> None:
    """What a model costs in memory and arithmetic, from its config alone."""
    from denim.commands.ledger import show_ledger

    show_ledger(model, lengths, dtype, state_dtype, kv_dtype, as_json)


@app.command()
def plan(
    model: ConfigOrModel = None,
    device: Annotated[str, typer.Option(help="H200, H100, L40S, RTX4090 or CPU.")] = "H200",
    memory: Annotated[
        str | None, typer.Option(help="The arena on each device: 60GiB, …; default: what an engine takes.")
    ] = None,
    lengths: Annotated[str | None, typer.Option(help="Requests of these lengths: 512,4096,…")] = None,
    lognormal: Annotated[
        str | None, typer.Option(metavar="MEAN,SIGMA", help="Lengths with this mean, and sigma of their log.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="JSON lines with prompt_length and output_length (or Mooncake's).")
    ] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(help="Devices that share the model; default: the fewest that hold it.")
    ] = None,
    drafts: Annotated[int, typer.Option(help="Drafts that a step verifies.")] = 0,
    host_memory: Annotated[
        str | None, typer.Option(help="Beside each device, for checkpoints that leave its arena: 256GiB, …")
    ] = None,
    checkpoint_dtype: Annotated[
        str, typer.Option(help="Of states in host memory: auto, bfloat16 or int8.")
    ] = "auto",
    dtype: Dtype = "auto",
    state_dtype: StateDtype = "auto",
    kv_dtype: KvDtype = "auto",
    compare: Annotated[
        bool, typer.Option("--compare", help="Also what vLLM's and SGLang's rules give.")
    ] = False,
    as_json: AsJson = False,
    web: Annotated[
        bool, typer.Option("--web", help="Serve a page on which all of it can be turned.")
    ] = False,
    port: Annotated[int, typer.Option(help="Of --web, on this machine alone; 0: any free one.")] = 8421,
) -> None:
    """What fits on a device, and how fast it can be at best, from a config alone."""
    if web:
        from denim.commands.explorer import show_explorer

        beside = {"--memory": memory, "--drafts": drafts, "--compare": compare, "--json": as_json}
        beside |= {"--host-memory": host_memory, "--checkpoint-dtype": checkpoint_dtype != "auto"}
        options = {
            "device": device,
            "gpus": tensor_parallel,
            "lengths": lengths,
            "lognormal": lognormal,
            "dtype": dtype,
            "state_dtype": state_dtype,
            "kv_dtype": kv_dtype,
        }
        show_explorer(model, port, options, trace, [name for name, value in beside.items() if value])
        return
    from denim.commands.plan import show_plan

    show_plan(
        model,
        device,
        memory,
        lengths,
        lognormal,
        trace,
        tensor_parallel,
        drafts,
        host_memory,
        checkpoint_dtype,
        dtype,
        state_dtype,
        kv_dtype,
        compare,
        as_json,
    )


@app.command()
def inspect(model: ModelFolder = None, as_json: AsJson = False) -> None:
    """Layers, sizes and dtypes of a model; its weights are not read."""
    from denim.commands.inspect import show_model

    show_model(model, as_json)


@app.command()
def families(
    markdown: Annotated[bool, typer.Option("--markdown", help="The table of the README.")] = False,
) -> None:
    """The model families that can be served."""
    from denim.commands.families import show_families

    show_families(markdown)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """What this machine has, and what Denim would use of it."""
    from denim.commands.doctor import show_machine

    show_machine(as_json)


@app.command()
def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Text to go on with; -: stdin.")
    ] = None,
    model: Model = None,
    max_tokens: MaxTokens = COMPLETION_TOKENS,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    state_dtype: StateDtype = "auto",
    memory: Memory = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Complete a prompt; the text streams to stdout."""
    from denim.commands.engine import open_engine
    from denim.commands.generate import print_completion, read_prompt, stream_completion

    params = denim.SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
    )
    text = read_prompt(prompt)
    llm = open_engine(model, device, dtype, state_dtype, memory, quiet)
    if as_json:
        print_completion(llm, text, params)
    elif not stream_completion(llm, text, params):
        raise typer.Exit(INTERRUPTED)


@app.command()
def chat(
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    think: Annotated[bool, typer.Option(help="Let the model think before it answers.")] = False,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    state_dtype: StateDtype = "auto",
    memory: Memory = None,
    quiet: Quiet = False,
) -> None:
    """Talk with a model."""
    from denim.commands.chat import Chat, run_chat
    from denim.commands.engine import open_engine

    params = denim.SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
    )
    llm = open_engine(model, device, dtype, state_dtype, memory, quiet)
    run_chat(Chat(llm, params, system, think))


@app.command()
def serve(
    model: ModelFolder = None,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0: on all interfaces.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name of the model for clients; may be given again.")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="Key that clients must send; may be given again.", envvar="DENIM_API_KEY"),
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin whose pages may call; may be given again. *: all.")
    ] = None,
    max_body: Annotated[str, typer.Option(help="Largest body of a request.")] = "32MiB",
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Longest prompt.")] = None,
    max_streams: Annotated[int, typer.Option(help="Completions in work at once; beyond: 429.")] = 2048,
    max_queue: Annotated[int, typer.Option(help="Those of them without a token yet; beyond: 429.")] = 1024,
    body_timeout: Annotated[float, typer.Option(help="Seconds for a body to arrive.")] = 30.0,
    first_token_timeout: Annotated[float | None, typer.Option(help="Seconds to the first token.")] = None,
    request_timeout: Annotated[float | None, typer.Option(help="Seconds to the last one.")] = None,
    write_timeout: Annotated[
        float, typer.Option(help="Seconds for a client to take what it is sent.")
    ] = 60.0,
    drain_timeout: Annotated[float, typer.Option(help="Seconds for running requests after SIGTERM.")] = 30.0,
    log_format: Annotated[str, typer.Option(help="text or json.")] = "text",
    log_requests: Annotated[bool, typer.Option(help="A line for every request.")] = True,
    device: Device = "auto",
    dtype: Dtype = "auto",
    state_dtype: StateDtype = "auto",
    kv_dtype: KvDtype = "auto",
    memory: Memory = None,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of prompt and output.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Completions that run at once.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens of one step.")] = None,
    checkpoint_policy: Annotated[str, typer.Option(help="none, ends, auto, align or all.")] = "auto",
    checkpoint_dtype: Annotated[str, typer.Option(help="Of cached states below the device.")] = "auto",
    host_memory: Annotated[str, typer.Option(help="For cached prefixes: 8GiB, …")] = "0",
    disk_cache: Annotated[Path | None, typer.Option(help="A folder for cached prefixes.")] = None,
    disk_space: Annotated[str, typer.Option(help="Of that folder.")] = "16GiB",
    deferred_writes: Annotated[str, typer.Option(help="auto, off, or a number of steps.")] = "auto",
    strip_lines: Annotated[
        list[str] | None,
        typer.Option(help="Lines of system messages to leave out: a regular expression; may be given again."),
    ] = None,
    swap_space: Annotated[str, typer.Option(help="Host memory for preempted requests.")] = "4GiB",
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="No captured graphs.")] = False,
    seed: Annotated[int, typer.Option(help="For requests that bring none.")] = 0,
    quiet: Quiet = False,
) -> None:
    """Serve a model over HTTP: OpenAI's API, Anthropic's messages; docs/server.md lists everything."""
    from denim.commands.engine import memory_option, whole_number
    from denim.commands.serve import serve as serve_engine

    server_options = {
        "host": host,
        "port": port,
        "served_model_name": tuple(served_model_name or ()),
        "api_keys": tuple(api_key or ()),
        "cors_origins": tuple(cors_origin or ()),
        "max_body": max_body,
        "max_prompt_tokens": max_prompt_tokens,
        "max_streams": max_streams,
        "max_queue": max_queue,
        "body_timeout": body_timeout,
        "first_token_timeout": first_token_timeout,
        "request_timeout": request_timeout,
        "write_timeout": write_timeout,
        "drain_timeout": drain_timeout,
        "log_format": log_format,
        "log_requests": log_requests,
    }
    engine_options = {
        "model": model,
        "device": device,
        "dtype": dtype,
        "state_dtype": state_dtype,
        "kv_dtype": kv_dtype,
        "memory": None if memory is None else memory_option(memory),
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "checkpoint_policy": checkpoint_policy,
        "checkpoint_dtype": checkpoint_dtype,
        "host_memory": host_memory,
        "disk_cache": disk_cache,
        "disk_space": disk_space,
        "deferred_writes": None if deferred_writes == "off" else whole_number(deferred_writes),
        "strip_lines": tuple(strip_lines or ()),
        "swap_space": swap_space,
        "enforce_eager": enforce_eager,
        "seed": seed,
    }
    serve_engine(engine_options, server_options, quiet)


@app.command()
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
    """Where the time of a step goes: part by part, against the least that each must take."""
    from denim.commands.engine import open_engine
    from denim.commands.profile.report import numbers, show_profile

    batches, prompts = numbers("--batch", batch), numbers("--prompt", prompt)
    numbers("--context", str(context))
    llm = open_engine(model, device, dtype, state_dtype, memory, quiet)
    show_profile(llm, batches, context, prompts, out, as_json)


@app.command()
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
    """Whether answers from the prefix cache are those of a recompute, with this model on this machine."""
    from denim.commands.verify.report import show_verify

    if not show_verify(model, device, dtype, state_dtype, kv_dtype, seed, quick, as_json):
        raise typer.Exit(OTHER_ERROR)


cache = typer.Typer(help="The prefix cache.", no_args_is_help=True)
app.add_typer(cache, name="cache")


@cache.command("inspect")
def cache_inspect(
    where: Annotated[
        str, typer.Argument(metavar="WHERE", help="URL of `denim serve`, a disk_cache, or a snapshot's JSON.")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(help="Key of the server.", envvar="DENIM_API_KEY")] = None,
    most: Annotated[int, typer.Option(help="Most nodes that are drawn.")] = 100,
    as_json: AsJson = False,
) -> None:
    """The tree of prefixes as it stands: positions, checkpoints, bytes, hits."""
    from denim.commands.cache_inspect import show_cache

    show_cache(where, api_key, most, as_json)


study = typer.Typer(
    help="Measurements of the method itself: a table, a JSON file and a picture each.", no_args_is_help=True
)
app.add_typer(study, name="study")


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
    """Time, FLOPs and serial steps of the gated delta rule for chunks of 16 to 256 tokens."""
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
    """What a state loses in bf16, fp8 and int8: drift against float64, and denim-tiny's perplexity."""
    from denim.commands.study.precision import study_precision

    study_precision(tokens, length, windows, text, device, out, as_json)


bench = typer.Typer(help="Measurements of a running server.", no_args_is_help=True)
app.add_typer(bench, name="bench")


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
        str | None, typer.Option(help="What a good answer takes, in ms: ttft=500,itl=50,e2e=5000.")
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
    """A server under load: times to the first token, per token, to the end; throughput and goodput."""
    from denim.commands.bench.figures import parse_goodput
    from denim.commands.bench.lengths import read_lengths
    from denim.commands.bench.serve import bench_serve as measure
    from denim.commands.bench.workload import Wishes

    limits = parse_goodput(goodput)
    prompts, outputs = read_lengths(prompt, output, trace)
    wishes = Wishes(
        requests, turns, prompts, outputs, trace is not None, rate, think, shared_prefix, prefixes, seed
    )
    measure(
        url,
        model,
        wishes,
        chat=not completions,
        key=api_key,
        concurrency=concurrency,
        limits=limits,
        timeout=timeout,
        out=out,
        as_json=as_json,
    )


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"denim {denim.__version__}")
        raise typer.Exit


def main() -> None:
    """The entry point: run a command, turn Denim's own errors into one line and an exit code."""
    if sys.stdout is None:  # closed by the shell: >&-
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for the rest of the process)
    try:
        app()
    except DenimError as error:
        print(f"denim: {error}", file=sys.stderr)
        sys.exit(exit_code(error))
    except OSError as error:  # a full disk behind stdout, say
        print(f"denim: {error}", file=sys.stderr)
        sys.exit(OTHER_ERROR)


def exit_code(error: DenimError) -> int:
    if isinstance(error, ConfigError | RequestError):
        return BAD_INPUT
    return TOO_LARGE if isinstance(error, CapacityError) else OTHER_ERROR


if __name__ == "__main__":
    main()
