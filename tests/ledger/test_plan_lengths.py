"""Workloads: what they hold, and how bad ones are refused."""

from __future__ import annotations

import json
from fractions import Fraction
from math import exp
from pathlib import Path

import pytest

from denim.errors import ConfigError
from denim.ledger.lengths import Lengths


def test_blocks_are_counted_exactly() -> None:
    lengths = Lengths("three", (1, 10, 17), (16, 17, 33))
    assert lengths.mean_blocks(16) == Fraction(1 + 2 + 3, 3)
    assert lengths.mean_tokens == 22


@pytest.mark.parametrize(("mean", "sigma"), [(350, 0.0), (350, 0.8), (1100, 1.1)])
def test_a_lognormal_has_its_mean(mean: float, sigma: float) -> None:
    lengths = Lengths.lognormal(mean, sigma)
    assert lengths.mean_tokens == pytest.approx(mean, rel=1e-3)
    assert (len(set(lengths.totals)) == 1) == (sigma == 0)
    median = sorted(lengths.totals)[len(lengths.totals) // 2]
    assert median == pytest.approx(mean * exp(-(sigma**2) / 2), rel=0.01)


def test_no_request_of_a_lognormal_is_empty() -> None:
    assert min(Lengths.lognormal(2, 3).totals) == 1


@pytest.mark.parametrize(("mean", "sigma"), [(0, 1), (350, -1), (float("nan"), 1), (350, float("inf"))])
def test_a_lognormal_that_cannot_be(mean: float, sigma: float) -> None:
    with pytest.raises(ConfigError, match="lognormal lengths of mean"):
        Lengths.lognormal(mean, sigma)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt_length": 7, "output_length": 3},
        {"timestamp": 0, "input_length": 7, "output_length": 3, "hash_ids": [0]},
        {"prompt_tokens": 7, "completion_tokens": 3},
    ],
)
def test_the_names_that_a_trace_may_use(tmp_path: Path, row: dict[str, object]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(row) + "\n\n" + json.dumps(row) + "\n")
    lengths = Lengths.trace(path)
    assert (lengths.prompts, lengths.totals) == ((7, 7), (10, 10))
    assert lengths.name == "trace.jsonl"


def test_an_answer_may_be_empty(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"prompt_length": 7, "output_length": 0}')
    assert Lengths.trace(path).totals == (7,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no request"),
        ('{"prompt_length": 1, "output_length": 1}\n{', "line 2 is not JSON"),
        ("[" * 100_000, "line 1 is not JSON"),
        ('{"prompt_length": ' + "9" * 5_000 + "}", "line 1 is not JSON"),
        ("[1, 2]", "line 1 is not a JSON object"),
        ('{"output_length": 1}', "line 1 has none of prompt_length"),
        ('{"prompt_length": 1}', "line 1 has none of output_length"),
        ('{"prompt_length": 0, "output_length": 1}', "prompt_length is 0; it must be"),
        ('{"prompt_length": "9", "output_length": 1}', "prompt_length is '9'; it must be"),
        ('{"prompt_length": 9, "output_length": -1}', "output_length is -1; it must be"),
    ],
)
def test_a_bad_trace_names_the_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        Lengths.trace(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        Lengths.trace(tmp_path / "none.jsonl")


def test_what_is_too_long_is_left_out() -> None:
    lengths = Lengths("three", (1, 2, 3), (10, 20, 30))
    assert lengths.within(30) is lengths
    assert lengths.within(20).totals == (10, 20)
    assert lengths.within(20).prompts == (1, 2)
    with pytest.raises(ConfigError, match="three: the shortest request has 10 tokens.*at most 9"):
        lengths.within(9)
