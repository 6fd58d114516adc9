"""Records of measurements: each is listed with the command that made it, and what is named is there."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "bench" / "results"
PAGES = [
    ROOT / "README.md",
    RECORDS / "README.md",
    ROOT / "training/README.md",
    *(ROOT / "docs").rglob("*.md"),
]


def test_every_record_is_listed_and_every_listed_one_is_there() -> None:
    listed = re.findall(r"^\| `([^`]+\.json)`", (RECORDS / "README.md").read_text(encoding="utf-8"), re.M)
    assert sorted(listed) == sorted(file.name for file in RECORDS.glob("*.json"))


@pytest.mark.parametrize("record", sorted(RECORDS.glob("*.json")), ids=lambda file: file.stem)
def test_a_record_says_when_and_on_what(record: Path) -> None:
    content = json.loads(record.read_text(encoding="utf-8"))
    about = content.get("environment", content)
    assert about["date"] in record.name
    assert ("h200" in record.name) == (about["device"] == "NVIDIA H200")
    assert about["torch"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    """Records, programs, and the files that it links."""
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"[\w.-]+_\d{4}-\d\d-\d\d\.json", text):
        assert (RECORDS / name).exists(), name
    for module in re.findall(r"python -m ((?:bench|training)\.\w+)", text):
        assert importlib.util.find_spec(module), module
    for path in re.findall(r"(?<![\w/.-])(?:bench|denim|docs|tests|training)/[\w./-]+", text):
        assert (ROOT / path).parent.is_dir(), path  # a file's own name may stand for many: NAME.py
    for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text):
        assert (page.parent / target).exists(), target
