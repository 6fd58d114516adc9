"""Structured output in the matrix: the same tokens, and the same form, however a request was run.

Rows of the matrix in which every value of every axis is met by default; all rows with `-m slow`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from denim.engine.outputs import CompletionOutput
from denim.sampling_params import SamplingParams
from denim.structured_output import StructuredOutput
from tests.engine.byte_tokenizer import save, token_of
from tests.exactness.harness import AXES, COLD, Case, Crossing, Way, crossings, run, tokens_of
from tests.exactness.test_matrix import label
from tests.tiny import checkpoint

VOCAB = 288  # the tokenizer has 275 tokens
THINK_END = 274
BYTES = 256
FORKS = 3


def case(length: int, form: StructuredOutput | None, max_tokens: int, **params: object) -> Case:
    given = {"temperature": 0, "max_tokens": max_tokens, "structured": form, **params}
    return Case(tokens_of(length, 7, BYTES), SamplingParams(**given))  # type: ignore[arg-type]


WORDS = re.compile(r"([a-f]{2}[0-9]{1,3} ?)+")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "中"]}}}
CASES = [
    case(1, StructuredOutput(regex=WORDS.pattern), 14, logprobs=1, ignore_eos=True),
    case(17, StructuredOutput(json=SCHEMA | {"required": ["a", "b"]}), 24),
    case(64, StructuredOutput(choice=["yes", "no", "yes and no"]), 12, prompt_logprobs=0),
    case(
        5,
        StructuredOutput(regex=WORDS.pattern),
        14,
        temperature=1.0,
        seed=3,
        top_p=0.9,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        min_tokens=8,
        stop_token_ids=[token_of(b"z")],
        logit_bias={token_of(b"z"): 8.0},
    ),
    case(
        33,
        StructuredOutput(regex="[0-9]{6}", after="</think>"),
        16,
        temperature=1.0,
        seed=5,
        logit_bias={THINK_END: 5.0},
    ),
    case(70, StructuredOutput(grammar='root ::= "(" root ")" | [a-z]'), 10, temperature=1.3, seed=9),
    case(40, None, 12),
    case(9, None, 12, temperature=1.0, seed=2),
]


def covering(rows: list[Crossing]) -> list[Crossing]:
    """Few rows in which every value of every axis is met."""
    missing = {(axis, value) for axis, values in AXES.items() for value in values}
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(missing & set(zip(AXES, row.names, strict=True))))
        missing -= set(zip(AXES, best.names, strict=True))
        chosen.append(best)
    return chosen


ROWS = crossings(seed=1)
FEW = covering(ROWS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speaking")
    checkpoint(folder, vocab_size=VOCAB, seed=3)
    return save(folder)


@pytest.fixture(scope="module")
def cold(folder: Path) -> list[list[CompletionOutput]]:
    """Completions of every case run cold, by fork: fork i of a random case is the one of seed + i."""
    by_fork = []
    for fork in range(FORKS):
        cases = [
            Case(one.prompt, SamplingParams(**vars(one.params) | {"seed": (one.params.seed or 0) + fork}))
            for one in CASES
        ]
        by_fork.append([output.outputs[0] for output in run(folder, cases, COLD).outputs])
    return [list(forks) for forks in zip(*by_fork, strict=True)]


def check_form(one: Case, text: str, ended: bool) -> None:
    """By other means than the grammar's."""
    form = one.params.structured
    if form is None:
        return
    if form.after is not None:
        mark, text = text.partition(form.after)[1:]
        if not mark:
            return
        text = text.removeprefix("\n").removeprefix("\n")
    if form.regex == WORDS.pattern:
        assert WORDS.fullmatch(text if ended else text.rstrip("abcdef") + "ab1")
    elif form.regex is not None:
        assert re.fullmatch(r"\d{6}" if ended else r"\d{0,5}", text)
    elif form.json is not None and ended:
        assert json.loads(text).keys() == {"a", "b"}
    elif form.choice is not None:
        assert text in form.choice if ended else any(choice.startswith(text) for choice in form.choice)
    elif form.grammar is not None:
        assert re.fullmatch(r"\(*([a-z]\)*)?", text)
        assert not ended or text.count("(") == text.count(")")


def test_cold(cold: list[list[CompletionOutput]]) -> None:
    """The runs that all others are held against have their forms, and end in every way."""
    for one, forks in zip(CASES, cold, strict=True):
        for completion in forks:
            check_form(one, completion.text, completion.finish_reason == "stop")
    assert {completion.finish_reason for forks in cold for completion in forks} == {"stop", "length"}
    assert any("</think>" in completion.text for completion in cold[4])
    assert any(completion.stop_reason == token_of(b"z") for completion in cold[3])


def check_way(folder: Path, cold: list[list[CompletionOutput]], way: Way) -> None:
    outcome = run(folder, CASES, way)
    for one, forks, output in zip(CASES, cold, outcome.outputs, strict=True):
        assert len(output.outputs) == way.forks
        for fork, completion in enumerate(output.outputs):
            expected = forks[0 if one.params.temperature == 0 else fork]
            assert completion.token_ids == expected.token_ids
            assert (completion.text, completion.finish_reason) == (expected.text, expected.finish_reason)


@pytest.mark.parametrize("row", FEW, ids=map(label, FEW))
def test_every_value_of_every_axis(folder: Path, cold: list[list[CompletionOutput]], row: Crossing) -> None:
    check_way(folder, cold, row.way)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=map(label, ROWS))
def test_every_pair(folder: Path, cold: list[list[CompletionOutput]], row: Crossing) -> None:
    check_way(folder, cold, row.way)


def test_the_few_rows_have_every_value() -> None:
    for axis, values in AXES.items():
        place = list(AXES).index(axis)
        assert {row.names[place] for row in FEW} == set(values)
