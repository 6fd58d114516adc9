"""Files of a prefix cache: what is written comes back, what is damaged or foreign is refused with a reason,
and a crash at any moment leaves only whole files."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

from denim.errors import CheckpointError, ConfigError
from denim.memory import prefix_files
from denim.memory.prefix_files import PagePlace, PrefixFiles, StoredCheckpoint

IDENTITY = {"model": "abc", "page_size": 4}
PAGE_BYTES, STATE_BYTES = 24, 50


@pytest.fixture
def files(tmp_path: Path) -> Iterator[PrefixFiles]:
    opened = PrefixFiles(tmp_path / "cache", IDENTITY)
    yield opened
    opened.close()


def pieces(content: bytes, cuts: int) -> list[memoryview]:
    """`content` in several pieces, as it lies in scattered blocks."""
    step = max(1, len(content) // cuts)
    return [memoryview(bytearray(content[at : at + step])) for at in range(0, len(content), step)]


def page(n: int) -> bytes:
    return bytes((n + i) % 256 for i in range(PAGE_BYTES))


STATE = bytes(range(100, 100 + STATE_BYTES))


def checkpoint(number: int, pages: list[PagePlace], tokens: int = 11) -> StoredCheckpoint:
    return StoredCheckpoint(number, ("a salt", None), array("i", range(tokens)), "boundary", pages, 0.0)


def write(files: PrefixFiles, number: int = 3) -> None:
    size = files.write_pages(number, [pieces(page(n), 3) for n in range(3)])
    size_of_state = files.write_state(
        checkpoint(number, [PagePlace(number, row) for row in range(3)]), pieces(STATE, 4)
    )
    assert files.size_of(number) == (size, size_of_state)


def read(files: PrefixFiles, number: int, rows: list[int]) -> list[bytes]:
    into = [pieces(bytes(PAGE_BYTES), 2) for _ in rows]
    files.read_pages([PagePlace(number, row) for row in rows], into)
    return [b"".join(page) for page in into]


def test_what_is_written_comes_back(files: PrefixFiles) -> None:
    write(files)
    assert read(files, 3, [2, 0]) == [page(2), page(0)]
    into = pieces(bytes(STATE_BYTES), 7)
    files.read_state(3, into)
    assert b"".join(into) == STATE
    (found,), rows, passed = files.scan()
    assert (rows, passed) == ({3: 3}, [])
    assert found._replace(age=0.0) == checkpoint(3, [PagePlace(3, row) for row in range(3)])
    assert 0 <= found.age < 60


def test_they_are_safetensors(files: PrefixFiles) -> None:
    write(files)
    with safe_open(files.directory / "000000000003-pages.safetensors", framework="np") as file:
        assert file.get_tensor("pages").shape == (3, PAGE_BYTES)
    with safe_open(files.directory / "000000000003-state.safetensors", framework="np") as file:
        assert file.get_tensor("tokens").tolist() == list(range(11))
        assert file.get_tensor("state").tobytes() == STATE


def test_short_checkpoints_come_first_and_runs_of_pages_are_told_in_short(files: PrefixFiles) -> None:
    places = [PagePlace(1, 0), PagePlace(1, 1), PagePlace(2, 5), PagePlace(2, 6), PagePlace(1, 2)]
    files.write_state(checkpoint(4, places, tokens=20), [])
    files.write_state(checkpoint(9, places[:2], tokens=8), [])
    found, _, _ = files.scan()
    assert [one.number for one in found] == [9, 4]
    assert found[1].pages == places
    files.read_state(4, [])


def test_another_model_or_layout_is_refused(files: PrefixFiles) -> None:
    """The message says what differs, and what to do."""
    files.close()
    with pytest.raises(
        ConfigError, match=r"page_size 4, not 16\); name another directory, or remove this one"
    ):
        PrefixFiles(files.directory, IDENTITY | {"page_size": 16})
    PrefixFiles(files.directory, IDENTITY).close()


def test_another_version_is_refused(files: PrefixFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    files.close()
    monkeypatch.setattr(prefix_files, "FORMAT", 2)
    with pytest.raises(ConfigError, match="format 1, not 2"):
        PrefixFiles(files.directory, IDENTITY)


def test_a_manifest_that_cannot_be_read_is_refused(files: PrefixFiles) -> None:
    files.close()
    (files.directory / "manifest.json").write_text("{")
    with pytest.raises(ConfigError, match="its manifest cannot be read"):
        PrefixFiles(files.directory, IDENTITY)


def test_one_engine_at_a_time(files: PrefixFiles) -> None:
    with pytest.raises(ConfigError, match="is in use by another engine"):
        PrefixFiles(files.directory, IDENTITY)
    files.close()
    PrefixFiles(files.directory, IDENTITY).close()


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used: .*; name a directory that can be written"):
        PrefixFiles(tmp_path / "file" / "cache", IDENTITY)


def test_a_directory_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no engine's afterwards, though somebody still looks at the error."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(PrefixFiles, "_put", full)
        with pytest.raises(ConfigError, match="cannot be used: No space left on device") as caught:
            PrefixFiles(tmp_path, IDENTITY)
    PrefixFiles(tmp_path, IDENTITY).close()
    assert caught.tb


def test_files_of_others_are_passed_over_with_a_reason(files: PrefixFiles) -> None:
    """OF-05: a foreign or broken file is no checkpoint; what is right beside it stays."""
    write(files)
    folder = files.directory
    other = PrefixFiles(folder.parent / "other", {"model": "xyz", "page_size": 4})
    write(other, 5)
    other.close()
    (folder.parent / "other" / "000000000005-state.safetensors").rename(
        folder / "000000000005-state.safetensors"
    )
    (folder / "000000000006-state.safetensors").write_bytes(b"")
    (folder / "000000000007-pages.safetensors").write_bytes(b"x" * 300)
    whole = (folder / "000000000003-state.safetensors").read_bytes()
    (folder / "000000000008-state.safetensors").write_bytes(whole[:-1])
    (folder / "notes.txt").write_text("not ours")
    found, rows, passed = files.scan()
    assert [one.number for one in found] == [3] and rows == {3: 3}
    assert [reason[:18] for reason in passed] == [
        f"00000000000{n}-" + k for n, k in ((5, "state"), (6, "state"), (7, "pages"), (8, "state"))
    ]
    assert "belongs to another model or layout" in passed[0]
    assert (folder / "notes.txt").exists()


@pytest.mark.parametrize("part", ["pages", "state", "tokens"])
def test_a_flipped_bit_is_seen(files: PrefixFiles, part: str) -> None:
    write(files)
    name = f"000000000003-{'pages' if part == 'pages' else 'state'}.safetensors"
    content = bytearray((files.directory / name).read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    begin += json.loads(content[8:begin])[part]["data_offsets"][0]
    content[begin + (PAGE_BYTES if part == "pages" else 0)] ^= 16
    (files.directory / name).write_bytes(content)
    if part == "tokens":
        found, _, passed = files.scan()
        assert not found and "tokens do not have their checksum" in passed[0]
    elif part == "state":
        with pytest.raises(CheckpointError, match="row 0 does not have its checksum"):
            files.read_state(3, pieces(bytes(STATE_BYTES), 1))
    else:
        assert read(files, 3, [0, 2]) == [page(0), page(2)]
        with pytest.raises(CheckpointError, match="row 1 does not have its checksum"):
            read(files, 3, [0, 1])


def test_a_row_that_is_told_wrongly_is_seen(files: PrefixFiles) -> None:
    """Another row of pages would have its own checksum, and not belong to these tokens."""
    write(files)
    path = files.directory / "000000000003-state.safetensors"
    content = path.read_bytes()
    told = rb"\"pages\": [[3, 0, 3]]"
    assert content.count(told) == 1
    path.write_bytes(content.replace(told, rb"\"pages\": [[3, 1, 3]]"))
    found, _, passed = files.scan()
    assert not found and "what it says of itself does not have its checksum" in passed[0]
    with pytest.raises(CheckpointError, match="what it says of itself"):
        files.read_state(3, pieces(bytes(STATE_BYTES), 1))


def test_missing_files_and_rows(files: PrefixFiles) -> None:
    write(files)
    with pytest.raises(CheckpointError, match="000000000004-pages.safetensors cannot be read"):
        read(files, 4, [0])
    with pytest.raises(CheckpointError, match="ends too early"):
        read(files, 3, [3])
    files.remove_pages(3)
    files.remove_pages(3)
    files.remove_state(3)
    assert files.size_of(3) == (0, 0) and files.scan() == ([], {}, [])


@pytest.mark.parametrize("when", ["write", "fsync", "rename"])
def test_a_crash_in_the_middle_of_a_write(
    files: PrefixFiles, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Wherever it falls, the name is not there, and what was there before is untouched."""
    write(files, 1)

    class PowerFailureError(BaseException):
        pass

    def fail(*_: object) -> None:
        raise PowerFailureError

    with monkeypatch.context() as patch:
        if when == "write":
            patch.setattr(prefix_files, "_crc32", fail)
        elif when == "fsync":
            patch.setattr(os, "fsync", fail)
        else:
            patch.setattr(Path, "rename", fail)
        with pytest.raises(PowerFailureError):
            write(files, 2)
    files.close()
    again = PrefixFiles(files.directory, IDENTITY)
    found, rows, passed = again.scan()
    assert [one.number for one in found] == [1] and rows == {1: 3} and not passed
    assert not list(files.directory.glob("*.tmp"))
    again.close()


def test_a_full_disk_leaves_nothing(files: PrefixFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(files)
    assert {path.name for path in files.directory.iterdir()} == {"manifest.json", "lock"}


def test_a_page_in_more_pieces_than_a_call_takes(files: PrefixFiles) -> None:
    content = bytes(i % 251 for i in range(5000))
    files.write_pages(1, [pieces(content, 5000)])
    into = pieces(bytes(5000), 5000)
    files.read_pages([PagePlace(1, 0)], [into])
    assert b"".join(into) == content
