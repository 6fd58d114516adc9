"""Conversations: as many requests as asked for, of the lengths and at the times that were asked for,
repeatable."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from statistics import mean

import pytest

from denim.commands.bench.lengths import read_lengths
from denim.commands.bench.workload import Wishes, sessions_of
from denim.errors import ConfigError
from denim.ledger.lengths import Lengths


def wishes(**changes: object) -> Wishes:
    plain = {
        "requests": 10,
        "turns": 1,
        "prompts": Lengths.fixed(100),
        "outputs": Lengths.fixed(20),
        "paired": False,
        "rate": math.inf,
        "think": 0.0,
        "shared": 0,
        "prefixes": 1,
        "seed": 0,
    }
    return Wishes(**(plain | changes))  # type: ignore[arg-type]


def test_every_turn_counts_as_a_request() -> None:
    sessions = sessions_of(wishes(requests=10, turns=4), 1.0)
    assert [len(session.turns) for session in sessions] == [4, 4, 2]
    assert all(session.start == 0 and session.system == "" for session in sessions)
    assert {len(turn.text.split()) for session in sessions for turn in session.turns} == {100}
    assert {turn.output_tokens for session in sessions for turn in session.turns} == {20}


def test_texts_agree_in_their_shared_prefix_and_in_nothing_else() -> None:
    sessions = sessions_of(wishes(requests=40, shared=30, prefixes=3), 0.5)
    assert len({session.system for session in sessions}) == 3
    assert {len(session.system.split()) for session in sessions} == {15}
    assert len({session.turns[0].text[:60] for session in sessions}) == 40


def test_conversations_arrive_at_the_rate() -> None:
    starts = [session.start for session in sessions_of(wishes(requests=4000, rate=8.0), 1.0)]
    gaps = [after - before for before, after in itertools.pairwise(starts)]
    assert starts == sorted(starts) and starts[0] == 0
    assert mean(gaps) == pytest.approx(1 / 8, rel=0.06)
    assert mean(gap > 1 / 8 for gap in gaps) == pytest.approx(math.exp(-1), abs=0.03)  # Poisson


def test_the_seed_decides() -> None:
    one = sessions_of(wishes(rate=5.0, prompts=Lengths.lognormal(50, 1)), 1.0)
    assert one == sessions_of(wishes(rate=5.0, prompts=Lengths.lognormal(50, 1)), 1.0)
    assert one != sessions_of(wishes(rate=5.0, prompts=Lengths.lognormal(50, 1), seed=1), 1.0)


def test_a_traces_pairs_stay_pairs(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt_length": 10, "output_length": 1}\n{"prompt_length": 40, "output_length": 4}\n')
    prompts, outputs = read_lengths("512", "128", trace)
    sessions = sessions_of(wishes(requests=50, prompts=prompts, outputs=outputs, paired=True), 1.0)
    pairs = {(len(session.turns[0].text.split()), session.turns[0].output_tokens) for session in sessions}
    assert pairs == {(10, 1), (40, 4)}


def test_lengths() -> None:
    prompts, outputs = read_lengths("512", "100, 1.1", None)
    assert prompts.totals == (512,) and outputs.mean_tokens == pytest.approx(100, rel=0.02)


@pytest.mark.parametrize("text", ["", "0", "-3", "a", "1,2,3", "3.5", "5,x"])
def test_lengths_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match="--prompt is"):
        read_lengths(text, "128", None)


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"requests": 0}, "--requests is 0"),
        ({"turns": 0}, "--turns is 0"),
        ({"rate": 0.0}, "--rate is 0"),
        ({"rate": math.nan}, "--rate is nan"),
        ({"think": -1.0}, "--think is -1"),
        ({"shared": -1}, "--shared-prefix is -1"),
    ],
)
def test_wishes_that_cannot_be(changes: dict[str, object], seen: str) -> None:
    with pytest.raises(ConfigError, match=seen):
        wishes(**changes)
