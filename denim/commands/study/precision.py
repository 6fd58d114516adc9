"""`denim study precision`: what a state loses when it is kept in fewer bits.

Owns the run of the whole study, its tables and its picture.
"""

from __future__ import annotations

import json
import logging
import math
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from denim.commands.picture import need_folder, need_matplotlib, new_figure, write
from denim.commands.study.drift import drift
from denim.commands.study.inputs import random_inputs, real_inputs, texts_of
from denim.commands.study.perplexity import EXACT, MEMORY, perplexity
from denim.commands.study.storage import STORAGES
from denim.commands.tables import print_table
from denim.engine import LLM
from denim.engine.log import quiet_log
from denim.errors import ConfigError
from denim.ledger.units import plural

NAME = "study-precision"
FEWEST_TOKENS = 64
ONCE = {storage.name for storage in STORAGES if storage.once}
COLORS = {storage.name: f"C{i}" for i, storage in enumerate(STORAGES)}


def study_precision(
    tokens: int, length: int, windows: int, text: Path | None, device: str, out: Path, as_json: bool
) -> None:
    """Measure, print, and write NAME.json and NAME.png to `out`.

    tokens: length of the drift runs. length, windows: of the texts that denim-tiny reads. Raises ConfigError
    or RequestError for numbers or a text that cannot serve, and where matplotlib is missing.
    """
    for name, value, least in (
        ("tokens", tokens, FEWEST_TOKENS),
        ("windows", windows, 1),
        ("length", length, 2),
    ):
        if value < least:
            raise ConfigError(f"--{name} is {value}; give a whole number of at least {least}")
    need_matplotlib()
    need_folder(out)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a step is too small to share: threads would mostly wait
    try:
        with quiet_log(logging.WARNING):  # three engines start; their lines would bury the table
            result = measure(tokens, length, windows, text, device)
    finally:
        torch.set_num_threads(threads)
    write(out, NAME, result, draw(result))
    if as_json:
        print(json.dumps(result, indent=2))
        return
    console = Console(highlight=False)
    for source in ("random", "real"):
        console.print(f"{source} inputs, {tokens:,} tokens: relative error at the end, against float64")
        print_table(console, drift_table(result["drift"][source]))
    ppl = result["perplexity"]
    console.print(
        f"denim-tiny, {ppl['texts']} {plural('text', ppl['texts'])} of {ppl['length']:,} tokens, "
        "one token a step: perplexity"
    )
    print_table(console, stretch_table(ppl, "perplexity", "{:.2f}"))
    console.print("mean |Δ log-probability| against all fp32, thousandths of a nat")
    print_table(console, stretch_table(ppl, "difference", "{:.1f}", scale=1e3))


def measure(tokens: int, length: int, windows: int, text: Path | None, device: str) -> dict[str, Any]:
    llm = LLM(
        device=device,
        memory=MEMORY,
        enforce_eager=True,  # `real_inputs` looks into the layers
        max_num_seqs=windows,
        max_num_batched_tokens=max(length, windows),
        checkpoint_policy="none",  # every window is computed whole
    )
    longest = llm.core.capacity.max_model_len - 1  # one token is sampled behind a text
    if length > longest:
        raise ConfigError(f"--length is {length:,}; denim-tiny reads at most {longest:,} tokens and one more")
    texts = texts_of(llm, text, length, windows)
    place = llm.core.runner.forward.device
    sources = {"random": random_inputs(tokens, device=place), "real": real_inputs(llm, texts, tokens)}
    return {
        "study": "precision",
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else place.type,
        "torch": torch.__version__,
        "tokens": tokens,
        "text": "denim-tiny's own" if text is None else text.name,
        "drift": {name: drift(inputs, STORAGES) for name, inputs in sources.items()},
        "perplexity": perplexity(texts, device),
    }


def drift_table(run: dict[str, Any]) -> Table:
    grid = Table(box=SIMPLE_HEAD)
    for title in ("state kept in", "state", "worst head", "output", "largest output error"):
        grid.add_column(title, justify="left" if title == "state kept in" else "right")
    for name, curve in run["storages"].items():
        values = (curve["state"][-1], curve["worst_head"], curve["output"][-1], max(curve["output"]))
        grid.add_row(name, *(f"{value:.1e}" for value in values))
    return grid


def stretch_table(run: dict[str, Any], what: str, form: str, scale: float = 1) -> Table:
    """`what` of every run, a column for each stretch of positions, named by its end."""
    grid = Table(box=SIMPLE_HEAD, pad_edge=False)
    grid.add_column("read, up to", no_wrap=True)
    for end in (*run["edges"][1:], "all"):
        grid.add_column(str(end), justify="right", no_wrap=True)
    for name, values in run["runs"].items():
        if what == "difference" and name == EXACT:
            continue
        grid.add_row(
            name.removeprefix("state "),
            *(form.format(scale * value) for value in (*values[what], values[f"whole_{what}"])),
        )
    return grid


def draw(result: dict[str, Any]) -> Any:
    """Errors of state and output over tokens, for random and real inputs; then those of log-probabilities."""
    figure, (random, real, ppl) = new_figure(3)
    for axes, source in ((random, "random"), (real, "real")):
        run = result["drift"][source]
        for name, curve in run["storages"].items():
            # Before its checkpoint a state that is quantised once is the fp32 one, and its outputs too.
            first = run["points"].index(run["checkpoint"]) if name in ONCE else 0
            points = run["points"][first:]
            axes.plot(points, curve["state"][first:], color=COLORS[name], label=name)
            after = first + 1 if name in ONCE else first
            axes.plot(run["points"][after:], curve["output"][after:], ":", color=COLORS[name], linewidth=1)
        axes.axvline(run["checkpoint"], color="grey", linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="relative error against float64")
        axes.xaxis.set_minor_formatter("")
        axes.set_title(f"{source} inputs (dotted: outputs)", fontsize=10)
        axes.legend(fontsize=7)
    run = result["perplexity"]
    centres = [math.sqrt(max(a, 1) * b) for a, b in pairwise(run["edges"])]
    for name, values in run["runs"].items():
        if name == EXACT:
            continue
        # What is quantised once is the exact run before its checkpoint.
        points = [point for point in zip(centres, values["difference"], strict=True) if point[1] > 0]
        color = COLORS.get(name.removeprefix("state "), "black")
        ppl.plot(*zip(*points, strict=True), marker="o", markersize=4, color=color, label=name)
    ppl.set(xscale="log", yscale="log", xlabel="tokens read", ylabel="mean |Δ log-probability|, nats")
    ppl.xaxis.set_minor_formatter("")
    ppl.set_title(f"denim-tiny, {run['texts']} texts, against all fp32", fontsize=10)
    ppl.legend(fontsize=7)
    return figure
