"""Pictures and files of what commands measure.

Owns the way to matplotlib, which is an optional part of the installation, and where results are written.
Must not know what was measured.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from denim.errors import ConfigError, DenimError

DOTS_PER_INCH = 100


def new_figure(columns: int) -> tuple[Any, list[Any]]:
    """A figure with so many panels side by side. Raises ConfigError where matplotlib is missing."""
    need_matplotlib()
    from matplotlib.figure import Figure  # not pyplot: no window system, no global state

    figure = Figure(figsize=(5 * columns, 4.2), dpi=DOTS_PER_INCH, layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def need_matplotlib() -> None:
    """Raises ConfigError where matplotlib is missing; called before the measuring, which takes a while."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"pictures are drawn with matplotlib, which cannot be imported ({error}); "
            "install it with: pip install 'denim-llm[study]'"
        ) from error


def need_folder(folder: Path) -> None:
    """Raises ConfigError unless there is a folder for results, or can be, and it may be written to; called
    before the measuring. What it makes to find out it takes away again: not every measurement succeeds."""
    made: list[Path] = []
    try:
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"--out {str(folder)!r} is no folder to write to: {error}; name another") from error
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()


def write(folder: Path, name: str, result: dict[str, Any], figure: Any) -> None:
    """NAME.json and NAME.png in `folder`, both or none. Raises DenimError where there is no room."""
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    data, picture = folder / f"{name}.json", folder / f"{name}.png"
    try:
        data.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        figure.savefig(picture)
    except OSError as error:
        data.unlink(missing_ok=True)
        picture.unlink(missing_ok=True)
        if made:
            folder.rmdir()
        raise DenimError(
            f"--out {str(folder)!r} did not take the results: {error}; make room, or name another"
        ) from error
