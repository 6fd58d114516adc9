"""Runs the handbook and stores what it prints and draws: python -m docs.handbook.refresh

Owns what the two languages have in common. The code is the English notebook's; the Chinese one takes code and
outputs from it, cell by cell, and keeps its own prose. Cells have the same ids in the same order.
"""

from __future__ import annotations

from pathlib import Path

try:
    import nbformat
    from nbclient import NotebookClient
    from nbformat import NotebookNode
except ImportError as error:
    raise SystemExit(
        f"the handbook is run with nbformat and nbclient, and {error.name} cannot be imported; install what "
        "it needs with: pip install 'denim-llm[handbook]'"
    ) from error

FOLDER = Path(__file__).parent
ENGLISH, CHINESE = FOLDER / "handbook.ipynb", FOLDER / "handbook.zh.ipynb"
PATIENCE = 240  # seconds, for the kernel's start and for each cell: the machine may be busy


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def executed(path: Path) -> NotebookNode:
    """The notebook with the outputs of a fresh run. Raises CellExecutionError where a cell fails."""
    notebook = read(path)
    NotebookClient(
        notebook,
        timeout=PATIENCE,
        startup_timeout=PATIENCE,
        kernel_name="python3",
        record_timing=False,  # or every run would change the file
        coalesce_streams=True,
        resources={"metadata": {"path": str(FOLDER.parents[1])}},
    ).execute()
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def main() -> None:
    english, chinese = executed(ENGLISH), read(CHINESE)
    for ours, theirs in zip(english.cells, chinese.cells, strict=True):
        if ours.id != theirs.id or ours.cell_type != theirs.cell_type:
            raise SystemExit(f"{CHINESE.name}: cell {theirs.id!r} stands where {ours.id!r} is due")
        if ours.cell_type == "code":
            theirs.update(ours)
    nbformat.write(english, ENGLISH)
    nbformat.write(chinese, CHINESE)


if __name__ == "__main__":
    main()
