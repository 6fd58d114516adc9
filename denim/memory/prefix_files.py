"""The files of a prefix cache: one directory, readable after a restart and after a crash at any moment.

Owns names, the manifest, and how a file is written (under a temporary name, synced, renamed) and checked.
Knows bytes and what they are called; which are worth keeping, and when, `denim.cache.disk_tier` decides.

    manifest.json               what all files here belong to: model, layout, form of checkpoints
    000000000007-pages.safetensors    KV pages [rows, bytes], a checksum each
    000000000007-state.safetensors    a checkpoint: its tokens, its state, and where each of its pages lies

A checkpoint is there once its state file is: that one is written last. Pages that no state file names are
left over from a crash and are removed, as temporary files are.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
import zlib
from array import array
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from denim.errors import CheckpointError, ConfigError

FORMAT = 1
"""Of the files; it grows when they change."""

MANIFEST = "manifest.json"
LOCK = "lock"
TEMPORARY = ".tmp"
PAGES = "-pages.safetensors"
STATE = "-state.safetensors"

MOST_PIECES = 1024  # buffers of one call of the system (IOV_MAX of Linux)

Buffers = Sequence[memoryview]


class PagePlace(NamedTuple):
    """A page: the number of its file, and its row there."""

    file: int
    row: int


class StoredCheckpoint(NamedTuple):
    """A state file, as it says of itself. `namespace`: (salt, adapter); `age`: seconds since its last use."""

    number: int
    namespace: tuple[str | None, str | int | None]
    tokens: array[int]
    kind: str
    pages: list[PagePlace]
    age: float


class Stored(NamedTuple):
    """All checkpoints of a directory, short ones first; number -> rows of each file of pages; why files were
    passed over."""

    checkpoints: list[StoredCheckpoint]
    rows: dict[int, int]
    passed: list[str]


class PrefixFiles:
    """`directory` is made where it is missing. `identity`: what files must belong to, by name; every value is
    a number or text.

    Raises ConfigError when another process uses the directory, when it cannot be read or written, or when
    what lies there belongs to another model, layout or version.
    """

    def __init__(self, directory: Path, identity: Mapping[str, str | int]) -> None:
        self.directory = directory
        self._identity = {"format": FORMAT, **identity}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = (directory / LOCK).open("w")
        except OSError as error:
            raise _unusable(directory, error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ConfigError(
                f"disk_cache={str(directory)!r} is in use by another engine; name another directory for this"
                " one"
            ) from None
        try:
            self._check_manifest()
        except OSError as error:
            self._lock.close()
            raise _unusable(directory, error) from error

    def close(self) -> None:
        """Let others use the directory."""
        self._lock.close()

    def _check_manifest(self) -> None:
        path = self.directory / MANIFEST
        if not path.exists():
            self._put(MANIFEST, [memoryview(json.dumps(self._identity, indent=1).encode())])
            return
        try:
            found = json.loads(path.read_text())
            other = [
                f"{k} {found.get(k)!r}, not {v!r}" for k, v in self._identity.items() if found.get(k) != v
            ]
        except (ValueError, AttributeError, RecursionError):
            other = ["its manifest cannot be read"]
        if other:
            self._lock.close()
            raise ConfigError(
                f"disk_cache={str(self.directory)!r} belongs to something else ({'; '.join(other)}); name"
                " another directory, or remove this one"
            )

    # What is there

    def scan(self) -> Stored:
        """What is there. Temporary files are removed."""
        for path in self.directory.iterdir():
            if path.name.endswith(TEMPORARY):
                path.unlink()
        return read_stored(self.directory, self._identity)

    # Writing

    def write_pages(self, number: int, pages: Sequence[Buffers]) -> int:
        """A file of pages, each given as pieces; returns its bytes. Raises OSError."""
        size = sum(len(piece) for piece in pages[0])
        said = {"crc32": [_crc32(page) for page in pages]}
        tensors = {"pages": ("U8", [len(pages), size], [piece for page in pages for piece in page])}
        return self._write(file_name(number, PAGES), tensors, said)

    def write_state(self, checkpoint: StoredCheckpoint, state: Buffers) -> int:
        """A state file, given as pieces (none: a model without states); returns its bytes. The files of its
        pages must be there. Raises OSError."""
        runs = []
        for _, run in groupby(
            enumerate(checkpoint.pages), lambda item: (item[1].file, item[1].row - item[0])
        ):
            places = [place for _, place in run]
            runs.append([places[0].file, places[0].row, len(places)])
        said = {
            "namespace": checkpoint.namespace,
            "kind": checkpoint.kind,
            "pages": runs,
            "tokens_crc32": zlib.crc32(checkpoint.tokens),
            "crc32": _crc32(state),
        }
        size = sum(len(piece) for piece in state)
        tokens = memoryview(checkpoint.tokens).cast("B")
        tensors = {
            "tokens": ("I32", [len(checkpoint.tokens)], [tokens]),
            "state": ("U8", [size], list(state)),
        }
        return self._write(file_name(checkpoint.number, STATE), tensors, said)

    def _write(
        self, name: str, tensors: Mapping[str, tuple[str, list[int], list[memoryview]]], said: Any
    ) -> int:
        """A safetensors file whose data is given in pieces, so that nothing is copied for it."""
        told = json.dumps({"identity": self._identity, **said})
        header: dict[str, Any] = {"__metadata__": {"denim": told, "crc32": str(zlib.crc32(told.encode()))}}
        pieces, end = [], 0
        for tensor, (dtype, shape, data) in tensors.items():
            begin, end = end, end + sum(len(piece) for piece in data)
            header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
            pieces += data
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        return self._put(name, [memoryview(len(text).to_bytes(8, "little") + text), *pieces])

    def _put(self, name: str, pieces: Sequence[memoryview]) -> int:
        """The file under its name is whole, or not there."""
        temporary = self.directory / (name + TEMPORARY)
        try:
            with temporary.open("wb") as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            temporary.rename(self.directory / name)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        folder = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(folder)
        except OSError as error:  # some file systems sync no directories, and order renames on their own
            if error.errno != errno.EINVAL:
                raise
        finally:
            os.close(folder)
        return size

    # Reading

    def read_pages(self, places: Sequence[PagePlace], into: Sequence[Buffers]) -> None:
        """Pages into pieces of their size. Raises CheckpointError for a file that is missing or damaged."""
        order = sorted(range(len(places)), key=lambda i: places[i])
        for number, group in groupby(order, key=lambda i: places[i].file):
            self._read(file_name(number, PAGES), "pages", [(places[i].row, into[i]) for i in group])

    def read_state(self, number: int, into: Buffers) -> None:
        """The state into pieces of its size, and note that it was used. Raises CheckpointError as above."""
        if into:
            self._read(file_name(number, STATE), "state", [(0, into)])
        os.utime(self.directory / file_name(number, STATE))

    def _read(self, name: str, tensor: str, rows: Sequence[tuple[int, Buffers]]) -> None:
        path = self.directory / name
        try:
            with safe_open(path, framework="np") as opened:
                said = _said(name, opened.metadata(), self._identity)
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                begin = 8 + size + json.loads(file.read(size))[tensor]["data_offsets"][0]
                sums = said["crc32"] if isinstance(said["crc32"], list) else [said["crc32"]]
                for row, pieces in rows:
                    at = begin + row * sum(len(piece) for piece in pieces)
                    for first in range(0, len(pieces), MOST_PIECES):
                        part = pieces[first : first + MOST_PIECES]
                        wanted = sum(len(piece) for piece in part)
                        if os.preadv(file.fileno(), part, at) != wanted:
                            raise CheckpointError(f"{name} is damaged: it ends too early")
                        at += wanted
                    if _crc32(pieces) != sums[row]:
                        raise CheckpointError(f"{name} is damaged: row {row} does not have its checksum")
        except (OSError, ValueError, KeyError, IndexError, SafetensorError) as error:
            raise CheckpointError(f"{name} cannot be read: {error}") from error

    def remove_pages(self, number: int) -> None:
        """No error where it is gone already."""
        (self.directory / file_name(number, PAGES)).unlink(missing_ok=True)

    def remove_state(self, number: int) -> None:
        """No error where it is gone already."""
        (self.directory / file_name(number, STATE)).unlink(missing_ok=True)

    def size_of(self, number: int) -> tuple[int, int]:
        """Bytes of the two files of a number; 0 where there is none."""
        paths = [self.directory / file_name(number, suffix) for suffix in (PAGES, STATE)]
        pages, state = (path.stat().st_size if path.exists() else 0 for path in paths)
        return pages, state


def _unusable(directory: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"disk_cache={str(directory)!r} cannot be used: {error.strerror}; name a directory that can be"
        " written"
    )


def file_name(number: int, kind: str) -> str:
    """Of the file with this number; `kind`: `PAGES` or `STATE`."""
    return f"{number:012d}{kind}"


def read_stored(directory: Path, identity: Mapping[str, str | int]) -> Stored:
    """What the files of `directory` say of themselves that belong to `identity`, as its manifest has it.
    Changes nothing. States and pages are not read; they are checked when they are."""
    checkpoints, rows, passed = [], {}, []
    for path in sorted(directory.iterdir()):
        if not path.name.endswith((PAGES, STATE)):
            continue
        try:
            number = int(path.name.partition("-")[0])
            with safe_open(path, framework="np") as file:
                said = _said(path.name, file.metadata(), identity)
                if path.name.endswith(PAGES):
                    rows[number] = file.get_slice("pages").get_shape()[0]
                else:
                    tokens = array("i", file.get_tensor("tokens").tobytes())
                    checkpoints.append(_checkpoint(number, path, said, tokens))
        except (SafetensorError, CheckpointError, OSError, ValueError, KeyError) as error:
            passed.append(f"{path.name}: {error}")
    checkpoints.sort(key=lambda checkpoint: len(checkpoint.tokens))
    return Stored(checkpoints, rows, passed)


def _said(name: str, metadata: Mapping[str, str] | None, identity: Mapping[str, str | int]) -> dict[str, Any]:
    if not metadata or "denim" not in metadata:
        raise CheckpointError(f"{name} was not written by a prefix cache")
    if str(zlib.crc32(metadata["denim"].encode())) != metadata.get("crc32"):
        raise CheckpointError(f"{name} is damaged: what it says of itself does not have its checksum")
    said: dict[str, Any] = json.loads(metadata["denim"])
    if said["identity"] != identity:
        raise CheckpointError(f"{name} belongs to another model or layout than its directory")
    return said


def _checkpoint(number: int, path: Path, said: dict[str, Any], tokens: array[int]) -> StoredCheckpoint:
    pages = [PagePlace(file, row) for file, first, n in said["pages"] for row in range(first, first + n)]
    salt, adapter = said["namespace"]
    age = max(0.0, time.time() - path.stat().st_mtime)
    if zlib.crc32(tokens) != said["tokens_crc32"]:
        raise CheckpointError(f"{path.name} is damaged: its tokens do not have their checksum")
    return StoredCheckpoint(number, (salt, adapter), tokens, said["kind"], pages, age)


def _crc32(pieces: Buffers) -> int:
    value = 0
    for piece in pieces:
        value = zlib.crc32(piece, value)
    return value
