"""How a run is shown: a table, sentences, and a picture.

Owns the words. What the numbers mean `denim.commands.bench.figures` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from denim.commands.bench.figures import first_token, per_token, whole_answer
from denim.commands.picture import new_figure
from denim.commands.tables import print_table
from denim.ledger.units import seconds_text

if TYPE_CHECKING:
    from denim.commands.bench.client import Measured

ROWS = (
    ("first_token", "first token (TTFT)"),
    ("per_token_of_request", "per token, mean (TPOT)"),
    ("per_token", "per token (ITL)"),
    ("between_pieces", "between two pieces"),
    ("whole_answer", "whole answer (E2EL)"),
)
BINS = 60  # of the run's time in the picture
INDIGO, COPPER = "#2f4b8f", "#b45a1f"  # the colours of Denim's pages


def show(result: dict[str, Any]) -> None:
    """The table and the sentences around it."""
    console = Console(highlight=False)
    work = result["workload"]
    arrivals = "all at once" if work["rate"] == "inf" else f"{work['rate']:g} conversations/s"
    if work["rate"] != "inf" and work["burstiness"] != 1:
        arrivals += f" of burstiness {work['burstiness']:g}"
    if result["concurrency"]:
        arrivals += f", at most {result['concurrency']} in work"
    console.print(
        f"[bold]{escape(result['model'])}[/] at {escape(result['url'])} ({result['endpoint']}): "
        f"{result['completed']:,} of {result['requests']:,} requests in {result['seconds']:.1f} s; "
        f"{arrivals}; prompts {escape(work['prompts'])}, answers {escape(work['outputs'])}"
        + (f"; shared prefixes of {work['shared']:,} tokens: {work['prefixes']}" if work["shared"] else ""),
        soft_wrap=True,
    )
    grid = Table(box=SIMPLE_HEAD)
    grid.add_column("")
    for heading in result["first_token"] or ():
        grid.add_column(heading, justify="right")
    for key, label in ROWS:
        if result[key]:
            grid.add_row(label, *(seconds_text(value) for value in result[key].values()))
    print_table(console, grid)
    for line in sentences(result):
        console.print(line, soft_wrap=True)
    if len(result["turns"]) > 1:
        print_table(console, turns_table(result["turns"]))


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
        line = f"at most {result['peak_requests_in_work']:,} requests in work at once"
        if result["peak_output_tokens_per_second"]:
            line += f", {result['peak_output_tokens_per_second']:,.0f} output {unit} in one second"
        lines.append(line)
    if goodput := result["goodput"]:
        limits = ", ".join(
            f"{name} ≤ {seconds_text(limit)}" for name, limit in goodput["limits_seconds"].items()
        )
        rate = goodput["requests_per_second"] or 0.0
        lines.append(f"goodput ({limits}): {rate:.3g} requests/s, {goodput['share']:.1%} of all")
    if not result["ignores_eos"]:
        lines.append("without ignore_eos: answers may be shorter than asked for")
    if result["redrawn"] or result["ended_early"]:
        lines.append(
            f"the server takes {result['room_tokens']:,} tokens: {result['redrawn']:,} lengths were drawn "
            f"again, {result['ended_early']:,} conversations ended before their last turn"
        )
    if result["output_tokens_are"] == "pieces":
        lines.append("the server counts no tokens: output is counted in pieces, prompts by words")
    lines += [f"[red]{count:,} failed[/]: {escape(error)}" for error, count in result["errors"].items()]
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
