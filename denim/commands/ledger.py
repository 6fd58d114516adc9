"""`denim ledger`: what a model costs, without loading anything of it.

Owns the table. Knows the ledger; must not import torch, so that it answers at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from denim.commands.configs import find_config
from denim.commands.tables import print_table
from denim.errors import ConfigError
from denim.ledger import LENGTHS, ledger_json
from denim.ledger.units import count_text, flops_text, pattern_text, size_text
from denim.spec import ModelSpec, read_spec


def show_ledger(
    model: Path | None,
    lengths: str | None,
    dtype: str,
    state_dtype: str,
    kv_dtype: str,
    as_json: bool,
) -> None:
    """Print the ledger of a config, a model folder or a published model (None: the embedded model).

    Raises ConfigError for a config that cannot be read, and for lengths that are not whole numbers or beyond
    the model's positions.
    """
    config = find_config(model)
    spec = read_spec(config.place, dtype=dtype, state_dtype=state_dtype)
    asked = parse_lengths(lengths) if lengths is not None else default_lengths(spec)
    if max(asked) > spec.max_position:
        raise ConfigError(
            f"--lengths has {max(asked):,}; this model takes at most {spec.max_position:,} tokens"
        )
    values = ledger_json(spec, asked, kv_dtype)
    if as_json:
        print(json.dumps(values, indent=2))
        return
    console = Console(highlight=False)
    for line in summary(config.name, values):
        console.print(line, soft_wrap=True)
    print_table(console, table(values))


def default_lengths(spec: ModelSpec) -> list[int]:
    """The usual lengths below the model's context, and the context itself."""
    return [tokens for tokens in LENGTHS if tokens < spec.max_position] + [spec.max_position]


def parse_lengths(text: str) -> tuple[int, ...]:
    """ "512,1024" as numbers of tokens."""
    parts = [part.strip().replace("_", "") for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--lengths is {text!r}; give positive whole numbers with commas: 512,1024,4096")
    return tuple(int(part) for part in parts)


def summary(name: str, values: dict[str, Any]) -> list[str]:
    """What does not depend on a length, one fact a line."""
    per_token = f"{size_text(values['kv_bytes_per_token'])} of KV"
    if values["all_full_kv_bytes_per_token"] is not None:
        per_token += (
            f" ({size_text(values['all_full_kv_bytes_per_token'])} if every layer were full attention)"
        )
    if values["mtp_kv_bytes_per_token"]:
        per_token += f", {size_text(values['mtp_kv_bytes_per_token'])} more when the MTP head drafts"
    state, conv = size_text(values["state_bytes"]), size_text(values["conv_bytes"])
    lines = [
        f"[bold]{escape(name)}[/]: {pattern_text(values['layers'])} layers, "
        f"{count_text(values['parameters'])} parameters, {size_text(values['weight_bytes'])} in "
        f"{values['dtype']}; states in {values['state_dtype']}, KV in {values['kv_dtype']}",
        f"  a token     {per_token}",
        f"  a request   {size_text(values['bytes_per_request'])}: {state} of state, {conv} of convolution",
    ]
    if values["crossover_tokens"] is not None:
        lines.append(
            f"  crossover   {values['crossover_tokens']:,} tokens, from which on the hybrid is the smaller "
            f"({values['crossover_tokens_stored_width']:,} if the convolution's whole width is stored)"
        )
    return lines


def table(values: dict[str, Any]) -> Table:
    """One row a length: memory of a request, worth of a checkpoint, arithmetic."""
    grid = Table(box=SIMPLE_HEAD)
    for heading in ("tokens", "hybrid", "all full", "checkpoint ÷ KV", "prefill", "next token"):
        grid.add_column(heading, justify="right")
    for row in values["lengths"]:
        ratio = row["checkpoint_ratio"]
        grid.add_row(
            f"{row['tokens']:,}",
            size_text(row["hybrid_bytes"]),
            "-" if row["all_full_bytes"] is None else size_text(row["all_full_bytes"]),
            "-" if ratio is None else f"{ratio:.2g}",
            flops_text(row["prefill_flops"]),
            flops_text(row["decode_flops"]),
        )
    return grid
