from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from denim.cache.byte_arena import ByteArena
from denim.cache.hit_curve import hit_curve
from denim.cache.recorded_trace import BLOCK, OWN_TOKENS, read_trace
from denim.errors import CheckpointError, ConfigError
from denim.memory.layout import PAGE, SLOT, ArenaLayout
from denim.spec.reader import read_spec
from tests.memory.layouts import make_layout
from tests.spec.configs import qwen3_5_0_8b

SPEC = read_spec(qwen3_5_0_8b(), dtype="bfloat16")
LAYOUT = ArenaLayout.of(SPEC, 16)


def save(path: Path, entries: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, entries)))
    return path


def entry(seconds: float, prompt: int, answer: int, blocks: list[int]) -> dict[str, Any]:
    return {
        "timestamp": 1000 * seconds,
        "input_length": prompt,
        "output_length": answer,
        "hash_ids": blocks,
    }


def test_a_later_turn_goes_on_with_prompt_and_answer(tmp_path: Path) -> None:
    path = save(
        tmp_path / "t.jsonl",
        [
            entry(0, 700, 100, [1, 2]),
            entry(1, 700, 100, [8, 9]),
            entry(2, 1300, 50, [1, 3, 4]),  # goes on from the first: its second block holds the rest of it
            entry(3, 2000, 10, [1, 3, 5, 6]),
        ],
    )
    first, second, third, fourth = read_trace(path)
    assert (first.prompt, len(first.tokens)) == (700, 800)
    assert first.tokens == third.tokens[:800]
    assert third.time == 2.0 and third.tokens == fourth.tokens[:1350]
    own = [token for request in (first, second, third, fourth) for token in request.tokens]
    own = [token for token in own if token >= OWN_TOKENS]
    assert len(own) == len(set(own)) == 100 + 10, "answers that nobody goes on with are nobody else's"


def test_traces_without_blocks_and_with_too_few(tmp_path: Path) -> None:
    assert read_trace(save(tmp_path / "a", [{"prompt_length": 5, "output_length": 1}])) is None
    with pytest.raises(ConfigError, match="request 2: 1 hash_ids for a prompt of 600 tokens"):
        read_trace(save(tmp_path / "b", [entry(0, 10, 1, [1]), entry(0, 600, 1, [1])]))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hash_ids": 3}, "hash_ids must be a list of whole numbers"),
        ({"hash_ids": [1, {}]}, "hash_ids must be a list of whole numbers"),
        ({"timestamp": "soon"}, "timestamp is 'soon'; it must be a number"),
        ({"timestamp": float("nan")}, "timestamp is nan; it must be a number"),
        ({"timestamp": 10**400}, "timestamp is 1000.*; it must be a number"),
    ],
)
def test_values_that_cannot_be(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"request 1: {message}"):
        read_trace(save(tmp_path / "t", [entry(0, 600, 1, [1, 2]) | changed]))


def test_block_ids_may_be_hashes_of_any_length(tmp_path: Path) -> None:
    """Those that agree in their last 32 bits are different blocks."""
    first, second = read_trace(save(tmp_path / "t", [entry(0, 512, 1, [1]), entry(1, 512, 1, [1 + 2**70])]))
    assert first.tokens[0] != second.tokens[0]


def test_the_curve_rises_to_what_is_shared(tmp_path: Path) -> None:
    """40 conversations of 4 turns that take turns; without limit every turn reuses all of the one before."""
    chance = random.Random(0)
    entries, fresh = [], iter(range(10**6))
    histories = [[next(fresh) for _ in range(4)] for _ in range(40)]
    for turn in range(4):
        for history in histories:
            entries.append(entry(60 * turn + chance.random(), len(history) * BLOCK, 100, list(history)))
            history += [next(fresh) for _ in range(2)]
    trace = read_trace(save(tmp_path / "t.jsonl", sorted(entries, key=lambda e: e["timestamp"])))
    slot = LAYOUT.size_class(SLOT).stride
    sizes = [20 * slot, 100 * slot, 10_000 * slot]
    small, middle, large = hit_curve(SPEC, LAYOUT, trace, sizes, segment=8192)
    assert small.token_hit_rate < middle.token_hit_rate < large.token_hit_rate
    applied = sum((4 + 2 * turn) * BLOCK + 99 for turn in range(3))
    assert large.token_hit_rate == pytest.approx(applied / sum((4 + 2 * turn) * BLOCK for turn in range(4)))
    assert large.evicted == 0 < small.evicted
    assert 0 < large.flop_hit_rate < 1
    assert small.tail.prompt == 10 * BLOCK and small.tail.position <= large.tail.position
    assert large.tail == (4 * BLOCK, 0), "with all of it reused, first turns compute most"


def test_many_requests_run_in_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [entry(at, BLOCK, 10, [at % 7]) for at in range(20)]
    trace = read_trace(save(tmp_path / "t.jsonl", entries))
    sizes = [10**9, 10**12]
    alone = hit_curve(SPEC, LAYOUT, trace, sizes, segment=8192)
    monkeypatch.setattr("denim.cache.hit_curve.WORTH_PROCESSES", 20)
    assert hit_curve(SPEC, LAYOUT, trace, sizes, segment=8192) == alone


def test_bytes_are_counted() -> None:
    arena = ByteArena(make_layout(4, 1), 3 * 1024)
    assert arena.num_slabs == 3
    pages = arena.alloc_many(PAGE, 4)
    slot = arena.alloc(SLOT)
    assert arena.free == 1024 and arena.alloc_many(SLOT, 2) is None
    arena.share(PAGE, pages[:1])
    arena.release(PAGE, pages)
    assert arena.holders(PAGE, pages[0]) == 1 and arena.free == 1024 + 3 * 256
    arena.commit(slot, 5)
    arena.expect(slot, 5)
    with pytest.raises(CheckpointError, match="stands for 5 tokens, not 6"):
        arena.expect(slot, 6)
    arena.release(SLOT, [slot])
    with pytest.raises(CheckpointError):
        arena.expect(slot, 5)


def test_the_replay_needs_no_torch() -> None:
    check = "import sys, denim.cache.hit_curve, denim.cache.recorded_trace; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)
