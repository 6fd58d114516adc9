"""The directory of a disk tier as a tree, read without disturbing the engine that uses it."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import pytest

from denim import ConfigError
from denim.cache.snapshot import FORM
from denim.cache.stored_snapshot import stored_snapshot
from denim.memory.prefix_files import MANIFEST, PagePlace, PrefixFiles, StoredCheckpoint

IDENTITY = {"model": "small", "layout": 7}
PAGE = bytes(range(64))


def filled(directory: Path) -> PrefixFiles:
    """Tokens 0 .. 7 and 0 .. 11 of one user, which share two pages, a branch of the first, and another user's
    equal tokens."""
    files = PrefixFiles(directory, IDENTITY)
    files.write_pages(0, [[memoryview(PAGE)]] * 3)
    files.write_pages(1, [[memoryview(PAGE)]] * 2)
    first = [PagePlace(0, 0), PagePlace(0, 1)]
    for number, salt, tokens, kind, pages in (
        (10, None, range(8), "generation end", first),
        (11, None, range(12), "mark", [*first, PagePlace(0, 2)]),
        (12, None, [*range(8), 300, 1], "junction", [*first, PagePlace(1, 0)]),
        (13, "secret", range(4), "mark", [PagePlace(1, 1)]),
    ):
        checkpoint = StoredCheckpoint(number, (salt, None), array("i", tokens), kind, pages, 0.0)
        files.write_state(checkpoint, [memoryview(bytes(100))])
    return files


def test_checkpoints_stand_below_what_begins_them(tmp_path: Path) -> None:
    files = filled(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    found = stored_snapshot(tmp_path)
    assert json.loads(json.dumps(found)) == found and found["form"] == FORM
    by_space = {(node["namespace"], node["end"]): node for node in found["nodes"]}
    root, deeper, branch, other = (by_space[key] for key in ((1, 8), (1, 12), (1, 10), (0, 4)))
    at = found["nodes"].index
    assert (root["parent"], deeper["parent"], branch["parent"], other["parent"]) == (
        None,
        at(root),
        at(root),
        None,
    )
    assert [node["pages"] for node in (root, deeper, branch, other)] == [2, 1, 1, 1]
    assert root["below"] == 3 and root["start"] == 0 and deeper["start"] == branch["start"] == 8
    assert found["by_kind"] == {"generation end": 1, "mark": 2, "junction": 1}
    sizes = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert abs(sum(node["bytes"] for node in found["nodes"]) - sizes) <= len(found["nodes"])
    assert [space["salted"] for space in found["namespaces"]] == [True, False]
    assert "secret" not in json.dumps(found) and found["identity"]["model"] == "small"
    assert sorted(path.name for path in tmp_path.iterdir()) == before  # the lock of `files` is not asked for
    files.close()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    filled(tmp_path).close()
    victim = next(tmp_path.glob("*13-state*"))
    victim.write_bytes(victim.read_bytes()[:50])
    found = stored_snapshot(tmp_path)
    assert len(found["nodes"]) == 3 and victim.name in found["passed"][0]


def test_another_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no disk_cache"):
        stored_snapshot(tmp_path)
    for content in ("[]", "{}", "3", "{", "[" * 100_000):
        (tmp_path / MANIFEST).write_text(content)
        with pytest.raises(ConfigError, match=r"is no disk_cache"):
            stored_snapshot(tmp_path)
