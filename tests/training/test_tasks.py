"""Rows of the training mix: they are what the tokenizer would make of their text, and answers are right."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import denim
from training import tokenizer as bpe
from training.data import Data, Facts
from training.sources import SOURCES
from training.tasks import TASKS, WALK_CELLS, Kit, batch

FOLDER = Path(denim.__file__).parent / "weights" / "denim-tiny"
SENTENCE = "The quick brown fox jumps over the lazy dog and then it rests under a tree.\n"


@pytest.fixture(scope="module")
def kit() -> Kit:
    tokenizer = bpe.load(FOLDER)
    stream = np.array(tokenizer.encode(SENTENCE * 400).ids, np.uint16)
    streams = {source.name: stream for source in SOURCES}
    facts = Facts([["lamp", "noun", "a source of light"]], {"France": {"capital": "Paris"}})
    return Kit.of(tokenizer, Data(streams, streams, dict.fromkeys(streams, 1), facts))


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("length", [200, 1026])
def test_a_row_has_the_length_and_something_to_learn(kit: Kit, name: str, length: int) -> None:
    row = TASKS[name](np.random.default_rng(3), length, kit)
    assert len(row.ids) == len(row.weights) == length
    assert row.weights.sum() > 0


@pytest.mark.parametrize("name", ["lookup", "walk", "chat"])
def test_ids_are_what_the_tokenizer_makes_of_the_text(kit: Kit, name: str) -> None:
    ids = TASKS[name](np.random.default_rng(5), 700, kit).ids.tolist()
    text = kit.tokenizer.decode(ids, skip_special_tokens=False)
    assert kit.tokenizer.encode(text).ids[:-3] == ids[:-3]  # the row may end inside a word


def _learned(kit: Kit, name: str, seed: int, length: int = 1026) -> tuple[str, list[str]]:
    row = TASKS[name](np.random.default_rng(seed), length, kit)
    return kit.tokenizer.decode(row.ids.tolist(), skip_special_tokens=False), row.weights.tolist()


def test_registers_read_the_latest_value(kit: Kit) -> None:
    text, _ = _learned(kit, "registers", 1)
    values: dict[str, str] = {}
    reads = 0
    for line in text.split("\n")[:-1]:
        if line == "Registers":
            values = {}
        elif match := re.fullmatch(r"([a-h])([=?])(\d)", line):
            name, sign, digit = match.groups()
            if sign == "?":
                assert values[name] == digit
                reads += 1
            values[name] = digit
    assert reads > 20


def test_a_walk_stays_between_its_walls(kit: Kit) -> None:
    text, _ = _learned(kit, "walk", 1)
    place = asked = 0
    for line in text.split("\n")[:-1]:
        if line == "Walk":
            place = 0
        elif line in ("up", "down"):
            place = min(WALK_CELLS - 1, max(0, place + (1 if line == "up" else -1)))
        else:
            assert line == f"at {place}"
            asked += 1
    assert asked > 20


@pytest.mark.parametrize("seed", range(4))
def test_every_answer_of_recall_was_told_before(kit: Kit, seed: int) -> None:
    row = TASKS["recall"](np.random.default_rng(seed), 1026, kit)
    answers = kit.tokenizer.decode(row.ids[row.weights > 1].tolist(), skip_special_tokens=False)
    unlearned = kit.tokenizer.decode(row.ids[row.weights == 0].tolist())
    codes = re.findall(r"\d{6}", answers)
    told = re.findall(r"(?:code|name) .*? is (\w+)\.", unlearned)
    assert told
    assert set(codes) <= set(told)


def test_a_batch_depends_on_the_seed_alone(kit: Kit) -> None:
    shares = dict.fromkeys(TASKS, 1 / len(TASKS))
    first, second, other = (batch(np.random.default_rng(seed), shares, 6, 130, kit) for seed in (1, 1, 2))
    assert (first.ids == second.ids).all() and (first.weights == second.weights).all()
    assert first.ids.shape == (6, 130) and not (first.ids == other.ids).all()
