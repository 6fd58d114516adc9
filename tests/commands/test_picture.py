"""Where results cannot go is said before anything is measured, and nothing is left there."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import pytest

from denim.commands.picture import need_folder, write
from denim.commands.study.chunk_size import study_chunk_size
from denim.errors import ConfigError, DenimError


def test_without_matplotlib_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what makes an import fail
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"denim-llm\[study\]"):
        study_chunk_size(1, 1, 1, 1, "cpu", out, as_json=True)
    assert not out.exists()


def test_a_folder_that_can_be_made_is_not_made_yet(tmp_path: Path) -> None:
    need_folder(tmp_path / "a" / "b")
    need_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_what_cannot_be_a_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="--out .* is no folder to write to: .*; name another"):
        need_folder(tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**kwargs: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("denim.commands.picture.TemporaryFile", refused)
    with pytest.raises(ConfigError, match="Read-only file system; name another"):
        need_folder(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_without_room_no_half_result_is_left(tmp_path: Path) -> None:
    class Figure:
        def savefig(self, path: Path) -> None:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")

    for folder in (tmp_path, tmp_path / "new"):
        with pytest.raises(DenimError, match="did not take the results: .*No space left.*; make room"):
            write(folder, "study", {"rows": []}, Figure())
        assert list(tmp_path.iterdir()) == []
