"""Commands that run an engine for people or clients: generate, chat, serve.

Owns their options. The work is in `denim.commands`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import denim
from denim.cli.exit_codes import INTERRUPTED
from denim.cli.options import (
    AsJson,
    Device,
    Dtype,
    KvDtype,
    MaxTokens,
    Memory,
    Model,
    ModelFolder,
    Quiet,
    Seed,
    StateDtype,
    Temperature,
    TopK,
    TopP,
)

COMPLETION_TOKENS = 256
"""Most tokens of `denim generate` where nothing is said; a chat answer may fill the context."""


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
    """Serve a model over HTTP: OpenAI's API, Anthropic's messages. docs/server.md lists everything."""
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
