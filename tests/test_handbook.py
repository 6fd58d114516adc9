"""The handbook still holds: every cell runs, the stored text is what it prints, the languages agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from nbformat import NotebookNode

from docs.handbook.refresh import CHINESE, ENGLISH, executed, read

VARIES = "varies"  # tag of a cell whose digits hang on the last bit of the machine's arithmetic
MOST_BYTES = 400_000


@pytest.fixture(scope="module")
def english() -> NotebookNode:
    return read(ENGLISH)


@pytest.fixture(scope="module")
def chinese() -> NotebookNode:
    return read(CHINESE)


def printed(cell: NotebookNode) -> str:
    return "".join(out.text for out in cell.outputs if out.output_type == "stream")


def pictures(cell: NotebookNode) -> int:
    return sum("image/png" in out.get("data", {}) for out in cell.outputs)


def test_every_claim_holds_and_the_stored_outputs_are_fresh(
    english: NotebookNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a change: python -m docs.handbook.refresh."""
    for place in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):  # a kernel leaves files behind
        monkeypatch.setenv(place, str(tmp_path))
    fresh = executed(ENGLISH)
    for cell, now in zip(english.cells, fresh.cells, strict=True):
        if cell.cell_type != "code":
            continue
        assert all(out.get("name") != "stderr" for out in now.outputs), (cell.id, printed(now))
        assert pictures(cell) == pictures(now), cell.id
        if VARIES not in cell.metadata.get("tags", ()):
            assert printed(cell) == printed(now), f"{cell.id}: run python -m docs.handbook.refresh"


def test_both_languages_have_the_same_code_and_outputs(english: NotebookNode, chinese: NotebookNode) -> None:
    assert [cell.id for cell in english.cells] == [cell.id for cell in chinese.cells]
    for ours, theirs in zip(english.cells, chinese.cells, strict=True):
        assert ours.cell_type == theirs.cell_type
        if ours.cell_type == "code":
            assert ours == theirs, f"{ours.id}: run python -m docs.handbook.refresh"
        else:
            assert ours.source != theirs.source, f"{ours.id} is not translated"


def test_both_languages_name_the_same_numbers_and_formulas(
    english: NotebookNode, chinese: NotebookNode
) -> None:
    for ours, theirs in zip(english.cells, chinese.cells, strict=True):
        if ours.cell_type == "markdown":
            assert numbers(ours.source) == numbers(theirs.source), ours.id
            assert formulas(ours.source) == formulas(theirs.source), ours.id


def numbers(text: str) -> set[str]:
    """Of two digits and more; English writes smaller ones as words."""
    return set(re.findall(r"\d[\d,.]*\d", text))


def formulas(text: str) -> list[str]:
    return [" ".join(formula.split()) for formula in re.findall(r"\$\$(.+?)\$\$", text, flags=re.DOTALL)]


def test_notebooks_stay_small() -> None:
    assert max(path.stat().st_size for path in (ENGLISH, CHINESE)) < MOST_BYTES
