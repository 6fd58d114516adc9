"""Commands that need no engine: what a model costs, what fits, what is there.

Owns their options. The work is in `denim.commands`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from denim.cli.options import AsJson, ConfigOrModel, Dtype, KvDtype, StateDtype


def ledger(
    model: ConfigOrModel = None,
    lengths: Annotated[str | None, typer.Option(help="Lengths of the table: 512,1024,…")] = None,
    dtype: Dtype = "auto",
    state_dtype: StateDtype = "auto",
    kv_dtype: KvDtype = "auto",
    as_json: AsJson = False,
) -> None:
    """What a model costs in memory and FLOPs, from its config alone."""
    from denim.commands.ledger import show_ledger

    show_ledger(model, lengths, dtype, state_dtype, kv_dtype, as_json)


def plan(
    model: ConfigOrModel = None,
    device: Annotated[str, typer.Option(help="H200, H100, L40S, RTX4090 or CPU.")] = "H200",
    memory: Annotated[
        str | None, typer.Option(help="The arena on each device: 60GiB, …, or a fraction of the device: 0.5.")
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
    """What fits on a device, and how fast at best, from its config."""
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


def inspect(model: ConfigOrModel = None, as_json: AsJson = False) -> None:
    """Layers, sizes and dtypes of a model. Its weights are not read."""
    from denim.commands.inspect import show_model

    show_model(model, as_json)


def families(
    markdown: Annotated[bool, typer.Option("--markdown", help="The table of the README.")] = False,
) -> None:
    """The model families that can be served."""
    from denim.commands.families import show_families

    show_families(markdown)


def doctor(as_json: AsJson = False) -> None:
    """What this machine has, and what Denim would use of it."""
    from denim.commands.doctor import show_machine

    show_machine(as_json)
