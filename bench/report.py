"""A measurement's way out: a table for people, a JSON file with device, versions and date for the record.

Owns both forms, and the options that every bench has.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import denim


def parser_of(description: str | None) -> ArgumentParser:
    """Of a bench's options, --json among them; it is described by its docstring."""
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="a file for the record")
    return parser


def environment(device: str, packages: Sequence[str] = ()) -> dict[str, Any]:
    """What the figures depend on; `packages`: others whose versions belong to it."""
    if device.startswith("cuda"):
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    return {
        "date": datetime.date.today().isoformat(),
        "device": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: _version(name) for name in ("triton", "transformers", *packages)},
        "denim": denim.__version__,
        "threads": torch.get_num_threads(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def write(path: Path | None, device: str, rows: list[dict[str, Any]]) -> None:
    """Print `rows` (equal keys) as a table; with a path, write them as JSON."""
    columns = list(rows[0])
    cells = [columns] + [[_cell(row[c]) for c in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip())
    save(path, device, rows=rows)


def save(path: Path | None, device: str, packages: Sequence[str] = (), **figures: Any) -> None:
    """With a path, write the environment and the figures by their names as JSON."""
    if path is not None:
        path.write_text(
            json.dumps({"environment": environment(device, packages), **figures}, indent=1) + "\n"
        )


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
