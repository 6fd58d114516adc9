"""Conversations: as many requests as asked for, of the lengths and at the times that were asked for,
repeatable."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from statistics import mean, variance

import pytest

from denim.commands.bench.lengths import read_lengths
from denim.commands.bench.workload import Room, Session, Wishes, draw_sessions
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
        "burstiness": 1.0,
        "think": 0.0,
        "shared": 0,
        "prefixes": 1,
        "seed": 0,
    }
    return Wishes(**(plain | changes))  # type: ignore[arg-type]


def sessions_of(wishes: Wishes, words_per_token: float) -> list[Session]:
    """For a server that takes anything."""
    return draw_sessions(wishes, words_per_token, Room(10**9, 0)).sessions


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


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_bursts_keep_the_rate(burstiness: float) -> None:
    """The variance of a gamma distribution of shape b is 1/b times that of Poisson arrivals."""
    asked = wishes(requests=8000, rate=8.0, burstiness=burstiness)
    starts = [session.start for session in sessions_of(asked, 1.0)]
    gaps = [after - before for before, after in itertools.pairwise(starts)]
    assert mean(gaps) == pytest.approx(1 / 8, rel=0.06)
    assert variance(gaps) == pytest.approx((1 / 8) ** 2 / burstiness, rel=0.2)


def test_lengths_that_do_not_fit_are_drawn_again() -> None:
    """Whatever is sent has room, the template's tokens and words that turn out longer included."""
    asked = wishes(requests=300, prompts=Lengths.lognormal(400, 1.0), outputs=Lengths.lognormal(200, 1.0))
    drawn = draw_sessions(asked, 1.0, Room(1000, 20))
    turns = [turn for session in drawn.sessions for turn in session.turns]
    most = max((len(turn.text.split()) + 20) * 1.02 + turn.output_tokens for turn in turns)
    assert 900 < most <= 1000 and len(turns) == 300
    assert 20 < drawn.redrawn < 200 and drawn.ended == 0


def test_conversations_end_where_the_next_turn_would_not_fit() -> None:
    """Of 10 turns of 120 tokens four fit into 500; still as many requests are made."""
    drawn = draw_sessions(wishes(requests=10, turns=10), 1.0, Room(500, 0))
    assert [len(session.turns) for session in drawn.sessions] == [4, 4, 2]
    assert (drawn.redrawn, drawn.ended) == (0, 2)
    answers = wishes(requests=6, turns=9, prompts=Lengths.fixed(50), outputs=Lengths.fixed(100))
    assert [len(session.turns) for session in draw_sessions(answers, 1.0, Room(500, 0)).sessions] == [3, 3]


@pytest.mark.parametrize("asked", [{"prompts": Lengths.fixed(999)}, {"shared": 10**12}])
def test_lengths_that_never_fit(asked: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="are more than the 1,000 tokens that the server takes; give short"):
        draw_sessions(wishes(**asked), 1.0, Room(1000, 0))


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


def test_every_request_asks_for_a_token(tmp_path: Path) -> None:
    """Also where a trace has an answer without any."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt_length": 10, "output_length": 0}\n')
    prompts, outputs = read_lengths("512", "128", trace)
    (session,) = sessions_of(wishes(requests=1, prompts=prompts, outputs=outputs, paired=True), 1.0)
    assert session.turns[0].output_tokens == 1


def test_every_turn_has_the_template_s_tokens() -> None:
    assert Room(1000, 20).holds(prompt=400, answer=500, turns=1)
    assert not Room(1000, 20).holds(prompt=400, answer=500, turns=5)


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
        ({"burstiness": 0.0}, "--burstiness is 0"),
        ({"burstiness": math.inf}, "--burstiness is inf"),
        ({"think": -1.0}, "--think is -1"),
        ({"shared": -1}, "--shared-prefix is -1"),
    ],
)
def test_wishes_that_cannot_be(changes: dict[str, object], seen: str) -> None:
    with pytest.raises(ConfigError, match=seen):
        wishes(**changes)
