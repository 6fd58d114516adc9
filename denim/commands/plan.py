"""`denim plan`: what fits on a device, and how fast it can be at best, before the device is rented.

Owns options and the printed form. Knows the plan; must not import torch, so that it answers at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from denim.commands.configs import find_config
from denim.commands.engine import memory_option
from denim.commands.ledger import parse_lengths
from denim.commands.prefix_curve import curve_table, prefix_curve
from denim.commands.tables import print_table
from denim.errors import ConfigError
from denim.ledger.devices import find_device
from denim.ledger.lengths import Lengths
from denim.ledger.units import count_text, flops_text, parse_bytes, pattern_text, seconds_text, size_text
from denim.memory.capacity_plan import CapacityPlan
from denim.memory.checkpoint_form import EXACT
from denim.memory.fewest_devices import fewest_devices
from denim.memory.plan_json import plan_json
from denim.spec import read_spec

DEFAULT_LENGTHS = (512, 4096, 32768)


def show_plan(
    model: Path | None,
    device: str,
    memory: str | None,
    lengths: str | None,
    lognormal: str | None,
    trace: Path | None,
    tensor_parallel: int | None,
    drafts: int,
    host_memory: str | None,
    checkpoint_dtype: str,
    dtype: str,
    state_dtype: str,
    kv_dtype: str,
    compare: bool,
    as_json: bool,
) -> None:
    """Print the plan of a config, a model folder or a published model (None: the embedded model).

    `tensor_parallel` None: the fewest devices that hold it; one where `memory` says in bytes what is left
    beside the weights. Raises ConfigError for input that cannot be used, CapacityError when the model does
    not fit.
    """
    config = find_config(model)
    spec = read_spec(config.place, dtype=dtype, state_dtype=state_dtype)
    arena = None if memory is None else arena_option(memory)
    of = partial(
        CapacityPlan.of,
        spec,
        find_device(device),
        memory=arena,
        kv_dtype=kv_dtype,
        drafts=drafts,
        host_memory=0 if host_memory is None else parse_bytes("--host-memory", host_memory),
        checkpoint_dtype=checkpoint_dtype,
    )
    if tensor_parallel is None and not isinstance(arena, int):
        devices, plan = fewest_devices(of)
    else:
        devices = 1 if tensor_parallel is None else tensor_parallel
        plan = of(devices=devices)
    asked = read_workloads(lengths, lognormal, trace)
    if asked is None:
        asked = [Lengths.fixed(n) for n in DEFAULT_LENGTHS if n <= plan.longest_request]
        asked = asked or [Lengths.fixed(plan.longest_request)]
    values = plan_json(spec, plan, asked, compare)
    values["devices"] = devices
    if as_json:
        if (curve := prefixes(plan, trace)) is not None:
            values["prefix_curve"] = curve
        print(json.dumps(values, indent=2))
        return
    console = Console(highlight=False)
    for line in summary(config.name, values, chosen=tensor_parallel is None):
        console.print(line, soft_wrap=True)
    print_table(console, memory_table(values))
    for row in values["workloads"]:
        if row["left_out"]:
            console.print(
                f"{row['name']}: {row['left_out']:,} of {row['lengths']:,} lengths left out: above "
                f"{values['longest_request']:,} tokens, which model or arena do not take",
                soft_wrap=True,
            )
    print_table(console, floor_table(values))
    if compare:
        print_table(console, peers_table(values))
        for line in peers_notes(values):
            console.print(line, soft_wrap=True)
    if (curve := prefixes(plan, trace)) is not None:
        print_table(console, curve_table(curve))


def prefixes(plan: CapacityPlan, trace: Path | None) -> list[dict[str, Any]] | None:
    """What the prefix cache would reuse of `trace`; None without one that says. Takes about 3 ms a request,
    so that whoever waits is told."""
    if trace is None:
        return None
    with Console(stderr=True).status("running the trace through the prefix cache"):
        return prefix_curve(plan, trace)


def arena_option(text: str) -> int | float:
    """Bytes above 0, or a fraction of the device as a float. Raises ConfigError for what is neither."""
    value = memory_option(text)
    arena = value if isinstance(value, float) else parse_bytes("--memory", value)
    if arena <= 0 or (isinstance(arena, float) and arena > 1):
        raise ConfigError(
            f"--memory is {text}; give the arena's bytes with KiB, MiB, GiB or TiB, such as 60GiB, or a "
            "fraction of the device above 0 and at most 1"
        )
    return arena


def read_workloads(lengths: str | None, lognormal: str | None, trace: Path | None) -> list[Lengths] | None:
    """What one of three options asks for, None where none is given. Raises ConfigError for two."""
    refuse_two_kinds({"--lengths": lengths, "--lognormal": lognormal, "--trace": trace})
    if lengths is not None:
        return [Lengths.fixed(tokens) for tokens in parse_lengths(lengths)]
    if lognormal is not None:
        try:
            mean, sigma = (float(part) for part in lognormal.split(","))
        except ValueError:
            raise ConfigError(f"--lognormal is {lognormal!r}; give a mean and a sigma: 350,1.1") from None
        return [Lengths.lognormal(mean, sigma)]
    return None if trace is None else [Lengths.trace(trace)]


def refuse_two_kinds(lengths: Mapping[str, object]) -> None:
    """Raises ConfigError where more than one of these options is given, that is not None."""
    named = [name for name, value in lengths.items() if value is not None]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)} exclude each other; give one")


def summary(name: str, values: dict[str, Any], *, chosen: bool) -> list[str]:
    """What does not depend on the workload, one fact a line. `chosen`: nobody said how many devices."""
    device, devices = values["device"], values["devices"]
    each = f" on each of {devices}" if devices > 1 else ""
    arena = values["arena_bytes"]
    weights = f"FP8 blocks and {values['dtype']}" if values["fp8_blocks"] else values["dtype"]
    lines = [
        f"[bold]{escape(name)}[/]: {pattern_text(values['layers'])} layers, "
        f"{count_text(values['parameters'])} parameters; weights in {weights}, "
        f"KV in {values['kv_dtype']}, states in {values['state_dtype']}",
        f"  {device['name']:11} {size_text(device['memory_bytes'])}{each}: "
        f"{size_text(values['weight_bytes'])} of weights, "
        f"{size_text(values['working_bytes'])} of working memory, arena {size_text(arena)} "
        f"({values['num_slabs']:,} slabs of {size_text(values['slab_bytes'])})",
    ]
    if chosen and devices > 1:
        lines.append(
            f"  devices     {devices} are the fewest that hold it; --tensor-parallel plans for others"
        )
    if values["kv_bytes_per_token"]:
        lines.append(f"  a token     {size_text(values['kv_bytes_per_token'])} of KV")
    if values["bytes_per_request"]:
        lines.append(
            f"  a request   {size_text(values['bytes_per_request'])}: {size_text(values['state_bytes'])} of "
            "state" + (f", {size_text(values['conv_bytes'])} of convolution" if values["conv_bytes"] else "")
        )
    equal = values["checkpoint_equals_kv_of_tokens"]
    if equal and values["bytes_per_request"]:
        stored = values["stored_slot_bytes"]
        narrow = values["checkpoint_dtype"] != EXACT and values["host_bytes"]
        below = f"; {size_text(stored)} on the host, states in {values['checkpoint_dtype']}" if narrow else ""
        lines.append(f"  checkpoint  as much as the KV of {equal:,} tokens{below}")
    if values["crossover_tokens"] is not None:
        lines.append(f"  crossover   {values['crossover_tokens']:,} tokens")
    drafts = values["drafts"]
    if drafts and values["bytes_per_request"]:
        mtp = drafts["mtp_kv_bytes_per_token"]
        lines.append(
            f"  {drafts['drafts']} drafts".ljust(14)
            + f"{size_text(drafts['records_bytes'])} of records a request"
            + (f" and {size_text(mtp)} of KV a token" if mtp else "")
            + f"; a state for each would be {size_text(drafts['snapshots_bytes'])}"
        )
    return lines


def memory_table(values: dict[str, Any]) -> Table:
    """One row a workload: how many requests, and who holds the arena."""
    grid = Table(box=SIMPLE_HEAD)
    grid.add_column("requests of", overflow="fold")
    running = max(row["running"] for row in values["workloads"])
    cached = ["cached when idle", f"beside {running:,} running"]
    if values["host_bytes"]:
        cached.append("on the host")
    for heading in ("at once", "states", "KV", "rest", *cached):
        grid.add_column(heading, justify="right")
    for row in values["workloads"]:
        parts = (row["state_bytes"], row["kv_bytes"], row["rest_bytes"])
        grid.add_row(
            row["name"],
            f"{row['requests']:,}",
            *(f"{part / values['arena_bytes']:.1%}" for part in parts),
            f"{row['conversations']:,}",
            f"{row['conversations_beside']:,}",
            *([f"{row['conversations_on_host']:,}"] if values["host_bytes"] else []),
        )
    return grid


def floor_table(values: dict[str, Any]) -> Table:
    """Rows of a workload's steps under its name: the least that each moves, computes and lasts."""
    steps = {
        row["name"]: [(f"  decode × {floor['tokens']:,}", floor) for floor in row["decode"]]
        + [(f"  prefill {row['prefill']['tokens']:,}", row["prefill"])]
        for row in values["workloads"]
    }
    widest = max(len(step) for named in steps.values() for step, _ in named)
    grid = Table(box=SIMPLE_HEAD, title="at best", title_justify="left")
    grid.add_column("step", min_width=widest, overflow="fold")  # a workload's name may be folded, a step not
    for heading in ("bytes/token", "FLOP/token", "time/token", "lasts", "bound"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for name, named in steps.items():
        grid.add_row(name)
        for step, floor in named:
            grid.add_row(
                step,
                size_text(round(floor["bytes_per_token"])),
                flops_text(round(floor["flops_per_token"])),
                seconds_text(floor["seconds_per_token"]),
                seconds_text(floor["seconds"]),
                floor["bound"],
            )
    return grid


def peers_table(values: dict[str, Any]) -> Table:
    """The same memory under other engines' rules."""
    grid = Table(box=SIMPLE_HEAD, title="the same arena under published rules", title_justify="left")
    grid.add_column("engine", min_width=len("  SGLang 0.5.23 *"), overflow="fold")
    grid.add_column("rule")
    grid.add_column("a request", justify="right", no_wrap=True)
    grid.add_column("at once", justify="right", no_wrap=True)
    for row in values["workloads"]:
        grid.add_row(row["name"])
        exact = (row["state_bytes"] + row["kv_bytes"]) // max(1, row["requests"])
        parts = ["one slot"] if row["slots"] else []
        parts += [f"pages of {values['page_size']} tokens"] if row["pages"] else []
        rule = ", ".join(parts)
        grid.add_row("  Denim", rule, size_text(exact), f"{row['requests']:,}")
        for peer in row["peers"]:
            name = f"  {peer['name']}{'' if peer['served'] else ' *'}"
            grid.add_row(name, peer["rule"], size_text(peer["request_bytes"]), f"{peer['requests']:,}")
    return grid


def peers_notes(values: dict[str, Any]) -> list[str]:
    peers = values["workloads"][0]["peers"]
    missing = dict.fromkeys(peer["name"] for peer in peers if not peer["served"])
    return [f"* {name} has no model of this family; the numbers are its rule's" for name in missing]
