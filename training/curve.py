"""Draws loss.csv, which a training run wrote, as a picture.

Owns the picture. Knows the columns of the file and the names of the tasks.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated

import matplotlib
import typer

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from training.tasks import TASKS

SMOOTHING = 0.8  # share of the running mean that stays at each point


def smoothed(values: list[float]) -> list[float]:
    """An exponential running mean."""
    mean, result = values[0], []
    for value in values:
        mean = SMOOTHING * mean + (1 - SMOOTHING) * value
        result.append(mean)
    return result


def main(
    curve: Annotated[Path, typer.Argument(help="loss.csv")],
    picture: Annotated[Path, typer.Argument(help="the PNG to write")],
) -> None:
    with curve.open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure, axes = plt.subplots(figsize=(9, 5), dpi=110)
    for name in (*TASKS, "mtp"):
        points = [(float(row["tokens"]) / 1e6, float(row[name])) for row in rows if row[name]]
        style = {"linewidth": 2.2, "color": "black"} if name == "text" else {"linewidth": 1.2}
        axes.plot([x for x, _ in points], smoothed([y for _, y in points]), label=name, **style)
    previous = None
    for row in rows:
        if row["length"] != previous:
            axes.axvline(float(row["tokens"]) / 1e6, color="grey", linestyle=":", linewidth=1)
            axes.text(
                float(row["tokens"]) / 1e6 + 2, 8.3, f"{row['length']} tokens a row", fontsize=8, color="grey"
            )
            previous = row["length"]
    axes.set(xlabel="million tokens", ylabel="loss, nats a weighted token", ylim=(0, 9), title="denim-tiny")
    axes.legend(ncols=2, fontsize=8)
    figure.tight_layout()
    figure.savefig(picture)


if __name__ == "__main__":
    typer.run(main)
