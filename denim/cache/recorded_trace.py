"""A recorded trace of requests whose content is known by blocks, in the format of Mooncake (FAST '25).

Owns reading it and what its block ids say of tokens. A line is a JSON object: `timestamp` (milliseconds),
`input_length`, `output_length`, and `hash_ids`, one for each block of `BLOCK` tokens of the prompt, equal
where all tokens up to the block's end are equal.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from denim.cache.replay import TraceRequest
from denim.errors import ConfigError

BLOCK = 512  # tokens
OWN_TOKENS = 1 << 30
"""Ids from here on are of answers that nobody goes on with."""
LATEST = 2**53
"""Milliseconds, from which on a double no longer tells them apart."""
_OFFSETS = np.arange(BLOCK)


@dataclass(frozen=True)
class RecordedTrace:
    """Requests in the order of their arrival, made one by one: their tokens would fill gigabytes.

    A request whose full blocks begin a later, longer one is its earlier turn: that one goes on with the rest
    of this prompt and with this answer, which block ids alone do not say. `last_turn[i]` is the request at
    the end of i's conversation; i itself where nobody goes on.
    """

    entries: list[dict[str, Any]]
    last_turn: list[int]

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[TraceRequest]:
        own = OWN_TOKENS
        for at, entry in enumerate(self.entries):
            prompt, answer = entry["input_length"], max(1, entry["output_length"])
            last = self.last_turn[at]
            blocks = self.entries[last]["hash_ids"][: -(-(prompt + answer) // BLOCK)]
            tokens = array("i", np.add.outer(np.multiply(blocks, BLOCK), _OFFSETS).astype(np.intc).tobytes())
            if last == at:
                tokens = tokens[:prompt]
                tokens.extend(range(own, own + answer))
                own += answer
            yield TraceRequest(entry["timestamp"] / 1000, tokens[: prompt + answer], prompt)


def read_trace(path: Path, limit: int | None = None) -> RecordedTrace | None:
    """The first `limit` requests (None: all) of a trace; None when its lines name no blocks.

    Raises ConfigError for a line that names too few of them, or values of another kind.
    """
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    entries = entries[:limit]
    needed = ("timestamp", "input_length", "output_length", "hash_ids")
    if not all(isinstance(entry, dict) and all(key in entry for key in needed) for entry in entries):
        return None
    for number, entry in enumerate(entries, 1):
        at, blocks = entry["timestamp"], entry["hash_ids"]
        if not isinstance(at, int | float) or not abs(at) < LATEST:
            raise ConfigError(
                f"--trace {path}, request {number}: timestamp is {at!r}; it must be a number of milliseconds"
            )
        if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
            raise ConfigError(f"--trace {path}, request {number}: hash_ids must be a list of whole numbers")
        if len(entry["hash_ids"]) < -(-entry["input_length"] // BLOCK):
            raise ConfigError(
                f"--trace {path}, request {number}: {len(entry['hash_ids'])} hash_ids for a prompt of"
                f" {entry['input_length']} tokens; there must be one for each {BLOCK} tokens"
            )
    # Ids of tokens are made of the blocks' and have 32 bits; a trace's may be hashes of 64.
    numbers: dict[int, int] = {}
    for entry in entries:
        entry["hash_ids"] = [numbers.setdefault(block, len(numbers)) for block in entry["hash_ids"]]
    return RecordedTrace(entries, _last_turns(entries))


def chains_of(entry: dict[str, Any]) -> list[int]:
    """One hash for each of the prompt's blocks, of that block and all before it."""
    return list(accumulate(entry["hash_ids"], lambda chain, block: hash((chain, block)), initial=0))[1:]


def _last_turns(entries: list[dict[str, Any]]) -> list[int]:
    later: dict[int, int] = {}  # hash of a chain of blocks -> the next request that has it
    last_turn = list(range(len(entries)))
    for at in range(len(entries) - 1, -1, -1):
        entry = entries[at]
        length = entry["input_length"] + entry["output_length"]
        chains = chains_of(entry)
        full = entry["input_length"] // BLOCK
        following = later.get(chains[full - 1]) if full else None
        if following is not None and entries[following]["input_length"] >= length:
            last_turn[at] = last_turn[following]
        later.update(dict.fromkeys(chains, at))
    return last_turn
