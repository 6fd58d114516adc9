"""`denim study chunk-size`: what the length of a chunk costs and saves in the gated delta rule.

Owns the measurement, its table and its picture. The products inside a chunk of C tokens cost C a token, so
FLOPs grow with C; the state goes from chunk to chunk one after the other, so serial steps fall as T / C.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from denim.commands.picture import need_folder, need_matplotlib, new_figure, write
from denim.commands.study.chunk_forms import forms_on
from denim.commands.tables import print_table
from denim.engine.loading import choose_device
from denim.errors import ConfigError
from denim.ledger.units import flops_text, plural
from denim.spec.linear import GatedDeltaNet

CHUNKS = (16, 32, 64, 128, 256)
NAME = "study-chunk-size"
GPU_REPEATS = 10  # runs in a row, so that the device and not the launch of its work is timed


def study_chunk_size(
    heads: int, dim: int, tokens: int, rounds: int, device: str, out: Path, as_json: bool
) -> None:
    """Measure, print, and write NAME.json and NAME.png to `out`.

    Raises ConfigError for numbers below 1, an unknown device, a folder that cannot be made, and where
    matplotlib is missing.
    """
    for name, value in {"heads": heads, "dim": dim, "tokens": tokens, "rounds": rounds}.items():
        if value < 1:
            raise ConfigError(f"--{name} is {value}; give a whole number of at least 1")
    need_matplotlib()
    place = choose_device(device)
    need_folder(out)
    result = measure(heads, dim, tokens, rounds, place, CHUNKS)
    write(out, NAME, result, draw(result))
    if as_json:
        print(json.dumps(result, indent=2))
        return
    console = Console(highlight=False)
    console.print(
        f"gated delta rule, {heads} {plural('head', heads)} of {dim}, {tokens:,} {plural('token', tokens)}, "
        f"{result['device']}: median of {rounds} {plural('round', rounds)}",
        soft_wrap=True,
    )
    for form in result["fastest_chunk"]:
        console.print(form)
        print_table(console, table(row for row in result["rows"] if row["form"] == form))


def measure(
    heads: int, dim: int, tokens: int, rounds: int, device: torch.device, chunks: Sequence[int]
) -> dict[str, Any]:
    """Times in seconds, of one sequence from an empty state; FLOPs by the ledger's formula.

    Forms and chunk sizes take turns inside a round, so that a slow moment of the machine meets all alike.
    """
    forms = forms_on(device, heads, dim, tokens, chunks)
    runs = {(form, chunk): run for form, by_chunk in forms.items() for chunk, run in by_chunk.items()}
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
    repeats = GPU_REPEATS if device.type == "cuda" else 1
    with torch.inference_mode():
        for round_ in range(rounds + 1):
            for key, run in runs.items():
                start = _now(device)
                for _ in range(repeats):
                    run()
                if round_:  # the first one warms up
                    seconds[key].append((_now(device) - start) / repeats)
    rule = GatedDeltaNet(heads, heads, dim, dim, conv_width=0)  # the rule alone: no convolution before it
    rows: list[dict[str, Any]] = []
    for form, chunk in runs:
        flops = rule.prefill_mixing_flops(tokens, chunk)
        with_state = 6 * heads * dim * dim * tokens  # of those, the three products with the state
        median = statistics.median(seconds[form, chunk])
        rows.append(
            {
                "form": form,
                "chunk": chunk,
                "seconds": median,
                "seconds_quartiles": _quartiles(seconds[form, chunk]),
                "flops": flops,
                "flops_with_state": with_state,
                "flops_inside_chunks": flops - with_state,
                "flops_per_second": flops / median,
                "serial_steps": -(-tokens // chunk),
            }
        )
    on_gpu = device.type == "cuda"
    return {
        "study": "chunk-size",
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(device) if on_gpu else f"cpu ({platform.machine()})",
        "threads": None if on_gpu else torch.get_num_threads(),
        "torch": torch.__version__,
        "heads": heads,
        "dim": dim,
        "tokens": tokens,
        "rounds": rounds,
        "rows": rows,
        "fastest_chunk": {form: _fastest(row for row in rows if row["form"] == form) for form in forms},
    }


def _fastest(rows: Iterable[dict[str, Any]]) -> int:
    return min(rows, key=lambda row: row["seconds"])["chunk"]


def _quartiles(values: list[float]) -> tuple[float, float]:
    """The rounds at a quarter and at three quarters of the order; one that stalls moves neither."""
    ordered = sorted(values)
    quarter = (len(ordered) - 1) // 4
    return ordered[quarter], ordered[-1 - quarter]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def table(rows: Iterable[dict[str, Any]]) -> Table:
    grid = Table(box=SIMPLE_HEAD)
    for title in ("C", "time", "quartiles", "FLOPs", "inside", "GFLOP/s", "steps"):
        grid.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        grid.add_row(
            str(row["chunk"]),
            f"{row['seconds'] * 1e3:.3g} ms",
            " to ".join(f"{seconds * 1e3:.3g}" for seconds in row["seconds_quartiles"]),
            flops_text(row["flops"]),
            f"{row['flops_inside_chunks'] / row['flops']:.0%}",
            f"{row['flops_per_second'] / 1e9:.0f}",
            f"{row['serial_steps']:,}",
        )
    return grid


def draw(result: dict[str, Any]) -> Any:
    """Left the time; right what it is made of: FLOPs that grow with C, serial steps that fall with it."""
    figure, (left, right) = new_figure(2)
    for form in result["fastest_chunk"]:
        rows = [row for row in result["rows"] if row["form"] == form]
        medians = [row["seconds"] * 1e3 for row in rows]
        low = [(row["seconds"] - row["seconds_quartiles"][0]) * 1e3 for row in rows]
        high = [(row["seconds_quartiles"][1] - row["seconds"]) * 1e3 for row in rows]
        left.errorbar(
            [row["chunk"] for row in rows], medians, yerr=(low, high), marker="o", capsize=3, label=form
        )
    # What follows is the same for every form; the first takes all chunk sizes.
    rows = [row for row in result["rows"] if row["form"] == next(iter(result["fastest_chunk"]))]
    chunks = [row["chunk"] for row in rows]
    left.set(ylabel="ms: median and quartiles of the rounds")
    if len(result["fastest_chunk"]) > 1:
        left.set_yscale("log")
        left.legend(fontsize=8)
    else:
        left.set_ylim(0, None)
    left.set_title(f"time of {result['tokens']:,} tokens, {result['device']}", fontsize=10)
    giga = 1e9
    state = [row["flops_with_state"] / giga for row in rows]
    right.stackplot(
        chunks,
        state,
        [row["flops_inside_chunks"] / giga for row in rows],
        labels=["products with the state", "products inside the chunks"],
        colors=["#9db4cc", "#3b5f8a"],
    )
    right.set(ylabel="GFLOP", ylim=(0, None))
    steps = right.twinx()
    steps.plot(
        chunks, [row["serial_steps"] for row in rows], color="#c4452f", marker="o", label="serial steps"
    )
    steps.set(ylabel="serial steps, T / C", ylim=(0, None))
    handles = [axes.get_legend_handles_labels() for axes in (right, steps)]
    right.legend(handles[0][0] + handles[1][0], handles[0][1] + handles[1][1], loc="upper center", fontsize=8)
    right.set_title("work and its order", fontsize=10)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(chunks, [str(chunk) for chunk in chunks])
        axes.set_xlabel("C, tokens a chunk")
    return figure
