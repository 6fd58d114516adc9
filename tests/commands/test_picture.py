"""A missing matplotlib is said before anything is measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from denim.commands.study.chunk_size import study_chunk_size
from denim.errors import ConfigError


def test_without_matplotlib_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what makes an import fail
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"denim-llm\[study\]"):
        study_chunk_size(1, 1, 1, 1, "cpu", out, as_json=True)
    assert not out.exists()
