"""`denim profile`: the table and the picture of where a step's time goes.

Owns the options' validation and the forms of the report. What is measured, and how, is `measure`'s business.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from denim.commands.picture import need_folder, need_matplotlib, new_figure, write
from denim.commands.profile.clock import Limits, limits_of
from denim.commands.profile.measure import StepProfile, profile_decode, profile_prefill
from denim.commands.tables import print_table
from denim.engine.llm import LLM
from denim.errors import ConfigError

NAME = "profile"
BEYOND = 64  # tokens of room behind the context, more than the steps that are measured
COLOURS = ("#3b5f8a", "#9db4cc", "#5a8f6b", "#c9a227", "#c4452f", "#8b8b8b", "#d9d9d9")


def numbers(option: str, text: str) -> list[int]:
    """Whole numbers from 1 up, by commas; an empty text is none. Raises ConfigError for anything else."""
    try:
        values = [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        values = [0]
    if any(value < 1 for value in values):
        raise ConfigError(f"{option} is {text!r}; give whole numbers of at least 1, such as 1,32")
    return values


def refuse_too_long(batches: list[int], context: int, prompts: list[int], longest: int) -> None:
    """Raises ConfigError for lengths that leave no room in `longest` tokens, a model's or an engine's; decode
    steps go some way beyond `context`."""
    for length in [context + BEYOND, *prompts] if batches else prompts:
        if length > longest - 1:
            raise ConfigError(
                f"{length} tokens are more than max_model_len={longest} has room for; lower --context or"
                " --prompt"
            )


def show_profile(
    llm: LLM, batches: list[int], context: int, prompts: list[int], out: Path | None, as_json: bool
) -> None:
    """Profile decode steps of each of `batches` behind `context` tokens and prompts of each length.

    Writes NAME.json and NAME.png to `out` if given. Raises ConfigError when a step does not fit.
    """
    core = llm.core
    refuse_too_long(batches, context, prompts, core.scheduler.config.max_model_len)
    if out is not None:
        need_matplotlib()
        need_folder(out)
    device = core.loaded.device
    limits = limits_of(device, getattr(torch, core.spec.dtype))
    profiles = [profile_decode(core, limits, rows, context) for rows in batches]
    profiles += [profile_prefill(core, limits, length) for length in prompts]
    result = _result(llm, limits, profiles)
    if out is not None:
        write(out, NAME, result, draw(profiles, f"{result['model']} on {result['device']}"))
    if as_json:
        print(json.dumps(result, indent=2))
        return
    console = Console(highlight=False)
    console.print(
        f"{escape(result['model'])} on {result['device']}: copies at "
        f"{limits.bytes_per_second / 1e9:,.0f} GB/s, products at "
        f"{limits.flops_per_second / 1e12:,.1f} TFLOP/s",
        soft_wrap=True,
    )
    for profile in profiles:
        print_table(console, table(profile))


def _result(llm: LLM, limits: Limits, profiles: list[StepProfile]) -> dict[str, Any]:
    device = llm.core.loaded.device
    return {
        "model": llm.core.loaded.name,
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "torch": torch.__version__,
        "dtype": llm.core.spec.dtype,
        "limits": limits._asdict(),
        "steps": [
            {
                "title": profile.title,
                "seconds": profile.seconds,
                "floor": profile.floor,
                "parts": [part._asdict() for part in profile.parts],
            }
            for profile in profiles
        ],
    }


def table(profile: StepProfile) -> Table:
    grid = Table(box=SIMPLE_HEAD, title=profile.title, title_justify="left")
    grid.add_column("part", no_wrap=True)
    for title in ("time", "share", "floor", "time / floor"):
        grid.add_column(title, justify="right", no_wrap=True)
    for part in profile.parts:
        over = f"{part.seconds / part.floor:.1f}" if part.floor else ""
        floor = f"{part.floor * 1e3:.3f} ms" if part.floor is not None else ""
        share = f"{part.seconds / profile.seconds:.0%}"
        grid.add_row(part.name, f"{part.seconds * 1e3:.3f} ms", share, floor, over)
    grid.add_section()
    over = f"{profile.seconds / profile.floor:.1f}"
    whole = (f"{profile.seconds * 1e3:.3f} ms", "", f"{profile.floor * 1e3:.3f} ms", over)
    grid.add_row("whole step", *whole, style="bold")
    return grid


def draw(profiles: list[StepProfile], title: str) -> Any:
    """A bar a step of its parts' shares, and where its floor lies."""
    figure, (axes,) = new_figure(1)
    figure.set_size_inches(9, 1.4 + 0.7 * len(profiles))
    names = list(dict.fromkeys(part.name for profile in profiles for part in profile.parts))
    for place, profile in enumerate(profiles):
        total = sum(part.seconds for part in profile.parts)
        left = 0.0
        for part in profile.parts:
            width = part.seconds / total
            colour = COLOURS[names.index(part.name) % len(COLOURS)]
            axes.barh(place, width, left=left, color=colour, edgecolor="white", height=0.6)
            left += width
        axes.plot([profile.floor / total] * 2, [place - 0.38, place + 0.38], color="black", linewidth=2)
    axes.set_yticks(
        range(len(profiles)), [f"{profile.title}\n{profile.seconds * 1e3:.2f} ms" for profile in profiles]
    )
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="share of the step; the black line is the floor")
    handles = [axes.barh(0, 0, color=COLOURS[i % len(COLOURS)], label=name) for i, name in enumerate(names)]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=3, fontsize=8)
    axes.set_title(title, fontsize=10)
    return figure
