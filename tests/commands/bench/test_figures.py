"""Numbers of runs whose times are known."""

from __future__ import annotations

from typing import Any

import pytest

from denim.commands.bench import figures as module
from denim.commands.bench.client import Measured
from denim.commands.bench.figures import mean_per_token, parse_goodput, parse_percentiles, per_token
from denim.errors import ConfigError


def figures(measured: list[Measured], limits: dict[str, float], tokens_known: bool = True) -> dict[str, Any]:
    return module.figures(measured, limits, tokens_known, (50, 90, 99))


def answer(sent: float, pieces: list[float], tokens: list[int] | None = None, **more: object) -> Measured:
    told = tokens or [0] * len(pieces)
    plain = {
        "piece_tokens": told,
        "ended": pieces[-1],
        "output_tokens": sum(told) or len(pieces),
        "prompt_tokens": 100,
        "cached_tokens": 25,
    }
    return Measured(0, 0, sent, pieces, **(plain | more))  # type: ignore[arg-type]


def test_one_token_a_piece() -> None:
    one = answer(1.0, [1.5, 1.6, 1.8])
    shown = figures([one], {}, True)
    assert shown["first_token"]["p50"] == pytest.approx(0.5)
    assert per_token(one) == pytest.approx([0.1, 0.2])
    assert shown["between_pieces"]["max"] == pytest.approx(0.2)
    assert shown["whole_answer"]["mean"] == pytest.approx(0.8)
    assert shown["output_tokens_per_second"] == pytest.approx(3 / 0.8)


def test_several_tokens_a_piece_are_told_apart_from_slow_ones() -> None:
    told = answer(0.0, [1.0, 1.4, 1.6], [4, 4, 1])
    assert per_token(told) == pytest.approx([0.1] * 4 + [0.2])
    assert mean_per_token(told) == pytest.approx(0.6 / 5)
    # The server names the sum alone: 12 tokens in 3 pieces.
    summed = answer(0.0, [1.0, 1.4, 1.6], output_tokens=12)
    assert per_token(summed) == pytest.approx([0.1, 0.05])
    # It names fewer tokens than it sent pieces: none of them took less than its gap.
    fewer = answer(0.0, [1.0, 1.4, 1.6], output_tokens=1)
    assert per_token(fewer) == pytest.approx([0.4, 0.2])
    # It names nothing: a piece is all that is known.
    silent = answer(0.0, [1.0, 1.4, 1.6], output_tokens=None)
    assert per_token(silent) == pytest.approx([0.4, 0.2])


def test_goodput_needs_every_limit() -> None:
    quick, late, slow = (
        answer(0.0, [0.1, 0.2, 0.3]),
        answer(0.0, [0.9, 1.0, 1.1]),
        answer(0.0, [0.1, 1.0, 2.0]),
    )
    failed = answer(0.0, [0.1, 0.2], error="status 500")
    run = [quick, late, slow, failed]
    assert figures(run, {"ttft": 0.5}, True)["goodput"]["met"] == 2
    shown = figures(run, {"ttft": 0.5, "tpot": 0.2, "e2el": 1.0}, True)["goodput"]
    assert (shown["met"], shown["share"], shown["requests_per_second"]) == (1, 0.25, 0.5)
    assert figures(run, {}, True)["goodput"] is None


def test_errors_are_counted_and_measured_by_nobody() -> None:
    bad = Measured(0, 0, 0.0, ended=9.0, error="status 503: full")
    shown = figures([bad, bad, answer(0.0, [1.0, 2.0])], {}, True)
    assert shown["errors"] == {"status 503: full": 2} and shown["completed"] == 1
    assert shown["whole_answer"]["max"] == 2.0
    nothing = figures([bad], {"ttft": 1.0}, True)
    assert nothing["first_token"] is None and nothing["goodput"]["share"] == 0


def test_turns_and_their_cached_tokens() -> None:
    first, second = answer(0.0, [1.0, 2.0]), answer(3.0, [3.2, 4.0], prompt_tokens=200, cached_tokens=150)
    second.turn = 1
    rows = figures([first, second], {}, True)["turns"]
    assert [(row["turn"], row["mean_prompt_tokens"], row["mean_cached_tokens"]) for row in rows] == [
        (1, 100, 25),
        (2, 200, 150),
    ]
    assert rows[1]["median_first_token"] == pytest.approx(0.2)


def test_percentiles() -> None:
    run = [answer(0.0, [i / 100, 2.0]) for i in range(1, 101)]
    shown = figures(run, {}, True)["first_token"]
    assert shown["p50"] == pytest.approx(0.505) and shown["p99"] == pytest.approx(0.9901)
    assert list(shown) == ["mean", "p50", "p90", "p99", "max"]
    assert parse_percentiles("25, 99.9") == (25, 99.9)
    assert list(module.figures(run, {}, True, (25, 99.9))["first_token"]) == ["mean", "p25", "p99.9", "max"]
    for text in ("", "0", "100", "x", "50,", "nan"):
        with pytest.raises(ConfigError, match="--percentiles is"):
            parse_percentiles(text)


def test_a_request_counts_once_in_its_mean() -> None:
    """TPOT is over requests, ITL over tokens; an answer in one piece has neither."""
    run = [
        answer(0.0, [1.0, 1.1], [1, 1]),
        answer(0.0, [1.0, 1.5, 2.0, 2.5], [1, 1, 1, 1]),
        answer(0.0, [1.0], [9]),
    ]
    shown = figures(run, {})
    assert shown["per_token_of_request"]["mean"] == pytest.approx((0.1 + 0.5) / 2)
    assert shown["per_token"]["mean"] == pytest.approx((0.1 + 3 * 0.5) / 4)


def test_peaks() -> None:
    run = [
        answer(0.0, [0.5, 1.5], [2, 30]),
        answer(0.0, [1.2, 1.9], [4, 5]),
        answer(1.9, [2.5], output_tokens=8),
    ]
    shown = figures(run, {})
    assert shown["peak_output_tokens_per_second"] == 30 + 4 + 5
    assert shown["peak_requests_in_work"] == 2, "the first one ended before the last one was sent"
    assert figures([answer(0.0, [0.1, 0.2])], {})["peak_output_tokens_per_second"] is None, "no second long"


def test_goodput_as_it_is_written() -> None:
    assert parse_goodput(None) == {}
    assert parse_goodput("ttft=500, tpot=20, e2el=2500") == {"ttft": 0.5, "tpot": 0.02, "e2el": 2.5}
    for text in ("ttft", "ttft=0", "ttft=x", "speed=3", "ttft=nan", "itl=3"):
        with pytest.raises(ConfigError, match="--goodput is"):
            parse_goodput(text)
