"""What lies in the directory of a disk tier, in the form of a snapshot.

Owns the way from files to nodes. Reads headers and token ids, no state and no page; takes no lock and removes
nothing, so that it may be asked while an engine uses the directory. Knows nothing of tiers.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

from denim.cache.snapshot import FORM
from denim.errors import ConfigError
from denim.memory.prefix_files import MANIFEST, PAGES, STATE, PagePlace, Stored, file_name, read_stored


def stored_snapshot(directory: Path) -> dict[str, Any]:
    """As `denim.cache.snapshot.snapshot`, but for these: nodes are checkpoints alone, each below the longest
    other one that begins it, with the pages that this one lacks; `account` is empty, as files count nothing;
    identity: what the files belong to; passed: why files were passed over.

    Raises ConfigError when the directory is none of a disk tier.
    """
    try:
        identity = json.loads((directory / MANIFEST).read_text())
        if not isinstance(identity, dict) or "format" not in identity:
            raise ValueError(f"{MANIFEST} is of something else")
        stored = read_stored(directory, identity)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{str(directory)!r} is no disk_cache, or cannot be read: {error}; it must have a {MANIFEST}"
        ) from None
    spaces = list(dict.fromkeys(checkpoint.namespace for checkpoint in stored.checkpoints))
    return {
        "form": FORM,
        "policy": "files",
        "account": {},
        "by_kind": dict(Counter(checkpoint.kind for checkpoint in stored.checkpoints)),
        "namespaces": [{"salted": salt is not None, "adapter": adapter} for salt, adapter in spaces],
        "nodes": _nodes(directory, stored, spaces),
        "left_out": 0,
        "identity": identity,
        "passed": stored.passed,
    }


def _nodes(directory: Path, stored: Stored, spaces: list[Any]) -> list[dict[str, Any]]:
    page_bytes = {
        number: (directory / file_name(number, PAGES)).stat().st_size / rows
        for number, rows in stored.rows.items()
    }
    nodes: list[dict[str, Any]] = []
    path: list[tuple[int, Any, bytes, set[PagePlace]]] = []  # what begins the one at hand, the deepest last
    # Sorted as text of equally long digits, whatever begins another one stands before it.
    ordered = sorted(stored.checkpoints, key=lambda c: (spaces.index(c.namespace), _digits(c.tokens)))
    for checkpoint in ordered:
        space, digits, pages = checkpoint.namespace, _digits(checkpoint.tokens), set(checkpoint.pages)
        while path and not (path[-1][1] == space and digits.startswith(path[-1][2])):
            path.pop()
        parent = path[-1][0] if path else None
        own = pages - path[-1][3] if path else pages
        path.append((len(nodes), space, digits, pages))
        state = (directory / file_name(checkpoint.number, STATE)).stat().st_size
        nodes.append(
            {
                "parent": parent,
                "namespace": spaces.index(space),
                "start": 0 if parent is None else nodes[parent]["end"],
                "end": len(checkpoint.tokens),
                "pages": len(own),
                "checkpoint": {"kind": checkpoint.kind, "hits": 0},
                "bytes": state + round(sum(page_bytes.get(place.file, 0) for place in own)),
                "below": 1,
                "running": 0,
                "lost": None,
            }
        )
    for node in reversed(nodes):
        if node["parent"] is not None:
            nodes[node["parent"]]["below"] += node["below"]
    return nodes


def _digits(tokens: array[int]) -> bytes:
    """Token ids so that the order of the bytes is that of the ids."""
    swapped = array("i", tokens)
    swapped.byteswap()
    return swapped.tobytes()
