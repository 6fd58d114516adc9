"""`denim verify`: the order of its work, the table, and what to do about what failed.

Owns options, the printed and the JSON form. Right and wrong are decided in `denim.commands.verify.judge`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from denim.commands.tables import print_table
from denim.commands.verify.checks import CHECKS, Check
from denim.commands.verify.matrix import CONTROL, Matrix, Row
from denim.engine.loading import LoadedModel, load
from denim.engine.log import quiet_log
from denim.engine.options import EngineOptions


class Extent(NamedTuple):
    """`positions` probes a check, behind up to `tokens` tokens."""

    positions: int
    tokens: int


WHOLE = Extent(12, 1024)
QUICK = Extent(4, 192)

# What may be at fault on a CUDA device, and the option that leaves it out, the likeliest first.
SUSPECTS: dict[str, tuple[str, Any]] = {
    "the kernels of the linear layers": ("recurrence_backend", "torch"),
    "attention's kernels": ("attention_backend", "torch"),
    "captured graphs": ("enforce_eager", True),
    "steps that overlap": ("async_scheduling", False),
    "deferred writes": ("deferred_writes", None),
}


def verify(options: dict[str, Any], seed: int, extent: Extent, console: Console) -> dict[str, Any]:
    """Run all checks on what `options` (of the engine) name; the report as JSON values. `console` shows which
    check runs, or, where it is a pipe or a file, a line for each as it ends. Raises ConfigError or
    CapacityError when the model cannot be served."""
    loaded = load(EngineOptions.of(**options))
    rows = []
    with quiet_log(logging.ERROR), console.status("loading") as status:  # a dozen would all say the same
        matrix = Matrix(loaded, options, seed, *extent)
        for row in _rows(matrix, status.update):
            rows.append(row)
            if not console.is_terminal:  # where a status shows nothing
                console.print(_ended(row), soft_wrap=True)
        failed = [check for check, row in zip(CHECKS, rows[1:], strict=True) if row.faults]
        culprits = _culprits(loaded, options, seed, extent, failed, status.update)
    return {
        "model": loaded.name,
        "device": str(loaded.device),
        "dtype": loaded.spec.dtype,
        "state_dtype": loaded.spec.state_dtype,
        "seed": seed,
        "positions": extent.positions,
        "tokens": extent.tokens,
        "passed": not any(row.faults for row in rows),
        "checks": [asdict(row) for row in rows],
        "advice": advice([row.name for row in rows if row.faults], culprits),
    }


def _rows(matrix: Matrix, say: Any) -> Iterable[Row]:
    say(CONTROL)
    yield matrix.control()
    names = [check.name for check in CHECKS]
    say(names[0])
    for row, following in zip(matrix.rows(CHECKS), [*names[1:], ""], strict=True):
        say(following)
        yield row


def _ended(row: Row) -> str:
    if row.left_out:
        return f"{row.name}: left out, {row.left_out}"
    told = f"{len(row.faults)} faults" if row.faults else "passed"
    return f"{row.name}: {told}, {row.seconds:.1f} s"


def _culprits(
    loaded: LoadedModel, options: dict[str, Any], seed: int, extent: Extent, failed: list[Check], say: Any
) -> list[tuple[str, str]]:
    """(what, option) of everything without which the first failed check passes; only a GPU has suspects."""
    found = []
    for what, (name, value) in SUSPECTS.items() if failed and loaded.device.type == "cuda" else ():
        say(f"{failed[0].name}, without {what}")
        without = options | {name: value}
        matrix = Matrix(load(EngineOptions.of(**without)), without, seed, *extent)
        if not any(row.faults for row in matrix.rows(failed[:1])):
            found.append((what, f"{name}={value!r}"))
    return found


def advice(failed: list[str], culprits: list[tuple[str, str]]) -> list[str]:
    """Sentences for whoever has to act; none when nothing failed."""
    if not failed:
        return []
    lines = []
    if CONTROL in failed:
        lines.append(
            "Already without a cache an answer depends on how its prompt is cut: do not serve this model here"
            " before that is found."
        )
    elif culprits:
        for what, option in culprits:
            lines.append(f"It passes without {what}: serve with {option}.")
    else:
        lines.append('Serve with checkpoint_policy="none": nothing is reused then, and answers are right.')
    lines.append(
        "Run again with another --seed, and with --dtype float32, which shows whether it is a fault or"
        " rounding; report it with the output of `denim verify --json` and `denim doctor --json`."
    )
    return lines


def show_verify(
    model: Path | None,
    device: str,
    dtype: str,
    state_dtype: str,
    kv_dtype: str,
    seed: int,
    quick: bool,
    as_json: bool,
) -> bool:
    """Print the report; whether all checks passed."""
    options = {
        "model": model,
        "device": device,
        "dtype": dtype,
        "state_dtype": state_dtype,
        "kv_dtype": kv_dtype,
    }
    report = verify(options, seed, QUICK if quick else WHOLE, Console(stderr=True))
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        print_report(report)
    return bool(report["passed"])


def print_report(report: dict[str, Any]) -> None:
    console = Console(highlight=False)
    console.print(
        f"[bold]{escape(report['model'])}[/] on {report['device']}, {report['dtype']} weights,"
        f" {report['state_dtype']} states, seed {report['seed']}:"
        " every answer against the same prompt computed anew",
        soft_wrap=True,
    )
    print_table(console, _table(report["checks"]))
    for row in report["checks"]:
        for fault in row["faults"]:
            console.print(f"[red]✗[/] {row['name']}: {escape(fault)}", soft_wrap=True, markup=True)
    for line in report["advice"]:
        console.print(f"→ {line}", soft_wrap=True)
    if report["passed"]:
        console.print("all checks passed")


def _table(rows: list[dict[str, Any]]) -> Table:
    grid = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    grid.add_column("", no_wrap=True)
    grid.add_column("check", no_wrap=True)
    for heading in ("asked", "reused", "tokens", "ties", "nat", "may be"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        if row["left_out"]:
            grid.add_row("-", row["name"], f"[dim]{row['left_out']}[/]")
            continue
        grid.add_row(
            "[red]✗[/]" if row["faults"] else "[green]✓[/]",
            row["name"],
            str(row["asked"]),
            f"{row['reused'] / row['prompted']:.0%}" if row["prompted"] else "",
            str(row["tokens"]),
            str(row["ties"]),
            f"{row['mean']:.1e}",
            f"{row['rule_mean']:.1e}",
        )
    return grid
