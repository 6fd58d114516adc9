"""Rows of weighted tokens: text, and tasks that make a model copy, look up, recall and keep state.

Owns how a row is put together. Knows the data and the tokenizer; nothing of models or devices. A weight
belongs to a token as something to predict: 0 for what cannot be known (a code when it is first told).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from tokenizers import Tokenizer

from training import words
from training.chats import conversation
from training.data import Data, Ids
from training.sources import SOURCES

TEXT_WEIGHT = 1.0
CHAT_WEIGHT = 2.0
ANSWER_WEIGHT = 4.0  # a few answers stand beside thousands of text tokens
WALK_CELLS = 8
REGISTER_NAMES = "abcdefgh"

Weights = NDArray[np.float32]


class Row(NamedTuple):
    ids: Ids
    weights: Weights


class Kit(NamedTuple):
    """What every task draws from. `chances`: share of each source in running text."""

    tokenizer: Tokenizer
    data: Data
    chances: NDArray[np.float64]

    @classmethod
    def of(cls, tokenizer: Tokenizer, data: Data) -> Kit:
        sizes = np.array([len(data.train[s.name]) * s.repeats for s in SOURCES], float)
        return cls(tokenizer, data, sizes / sizes.sum())

    def encode(self, text: str) -> Ids:
        return np.array(self.tokenizer.encode(text).ids, np.uint16)

    def text(self, rng: Generator, length: int, part: str = "train") -> Ids:
        """`length` running tokens of one source."""
        streams = self.data.train if part == "train" else self.data.held_out
        stream = streams[SOURCES[int(rng.choice(len(SOURCES), p=self.chances))].name]
        start = int(rng.integers(max(1, len(stream) - length)))
        return stream[start : start + length]


class Builder:
    """A row under construction: stretches of text or ids with one weight each."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.ids: list[Ids] = []
        self.weights: list[Weights] = []
        self.size = 0

    def add(self, part: str | Ids, weight: float) -> None:
        ids = self.kit.encode(part) if isinstance(part, str) else part
        self.ids.append(ids)
        self.weights.append(np.full(len(ids), weight, np.float32))
        self.size += len(ids)

    def row(self, length: int) -> Row:
        """The first `length` tokens."""
        return Row(np.concatenate(self.ids)[:length], np.concatenate(self.weights)[:length])


def text(rng: Generator, length: int, kit: Kit) -> Row:
    """Running text of one source."""
    builder = Builder(kit)
    while builder.size < length:
        builder.add(kit.text(rng, length - builder.size), TEXT_WEIGHT)
    return builder.row(length)


def copying(rng: Generator, length: int, kit: Kit) -> Row:
    """Stretches of text or of random tokens, each given twice."""
    builder = Builder(kit)
    longest = max(16, length // 3)
    while builder.size < length:
        size = int(np.exp(rng.uniform(np.log(8), np.log(longest))))
        if rng.random() < 0.5:
            stretch, weight = kit.text(rng, size), TEXT_WEIGHT
        else:
            stretch, weight = rng.integers(300, kit.tokenizer.get_vocab_size(), size).astype(np.uint16), 0.0
        builder.add("Copy:\n", 0.0)
        builder.add(stretch, weight)
        builder.add("\nAgain:\n", 0.0)
        builder.add(stretch, TEXT_WEIGHT)
        builder.add("\n", 0.0)
    return builder.row(length)


def lookup(rng: Generator, length: int, kit: Kit) -> Row:
    """Tables of keys and values, then questions for some of the keys."""
    builder = Builder(kit)
    while builder.size < length:
        count = int(np.exp(rng.uniform(np.log(3), np.log(max(4, min(200, length // 14))))))
        keys = _things(rng, count)
        values = rng.integers(10, 1000, count)
        builder.add("Table\n" + "".join(f"{k}: {v}\n" for k, v in zip(keys, values, strict=True)), 0.0)
        builder.add("Questions\n", 0.0)
        for i in rng.permutation(count)[: max(2, count // 2)]:
            builder.add(f"{keys[i]}:", 0.0)
            builder.add(f" {values[i]}", ANSWER_WEIGHT)
            builder.add("\n", 0.0)
    return builder.row(length)


def _things(rng: Generator, count: int) -> list[str]:
    """`count` different things such as "red lamp"."""
    pairs = rng.choice(len(words.ADJECTIVES) * len(words.NOUNS), count, replace=False)
    return [f"{words.ADJECTIVES[p // len(words.NOUNS)]} {words.NOUNS[p % len(words.NOUNS)]}" for p in pairs]


class Fact(NamedTuple):
    """Something told once in a long text: the sentence, a question for it, the bare and the full answer."""

    told: str
    question: str
    answer: str
    sentence: str


def planted_facts(rng: Generator, count: int) -> list[Fact]:
    """`count` facts about different things: 6-digit codes and names."""
    facts = []
    roles = rng.permutation(len(words.ROLES))
    for i, thing in enumerate(_things(rng, count)):
        if i < len(roles) and rng.random() < 0.35:
            subject, value = (
                f"The name of the {words.ROLES[roles[i]]}",
                words.NAMES[rng.integers(len(words.NAMES))],
            )
        elif count == 1 and rng.random() < 0.5:
            subject, value = "The secret code", _code(rng)
        else:
            subject, value = f"The code of the {thing}", _code(rng)
        sentence = f"{subject} is {value}."
        facts.append(Fact(sentence, f"What is {subject[0].lower()}{subject[1:]}?", value, sentence))
    return facts


def _code(rng: Generator) -> str:
    return "".join(str(d) for d in rng.integers(0, 10, 6))


def with_facts(builder: Builder, filler: Ids, facts: list[Fact], places: list[int]) -> None:
    """Adds `filler` with each fact told, on a line of its own, before the token at its place."""
    start = 0
    for place, fact in sorted(zip(places, facts, strict=True)):
        builder.add(filler[start:place], TEXT_WEIGHT)
        builder.add(f"\n{fact.told}\n", 0.0)
        start = place
    builder.add(filler[start:], TEXT_WEIGHT)


def recall(rng: Generator, length: int, kit: Kit) -> Row:
    """A long text with facts planted in it, then questions; plain or as a chat."""
    facts = planted_facts(rng, int(rng.integers(1, 3 + length // 256)))
    tail = Builder(kit)
    as_chat = rng.random() < 0.6
    for i in rng.permutation(len(facts)):
        fact = facts[i]
        answer = fact.sentence if rng.random() < 0.6 else f"{fact.answer}."
        if as_chat:
            lead = "\n\n" if tail.size == 0 else "\n<|im_start|>user\n"
            tail.add(f"{lead}{fact.question}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", 0.0)
            tail.add(f"{answer}<|im_end|>", ANSWER_WEIGHT)
        else:
            tail.add(f"\nQuestion: {fact.question}\nAnswer:", 0.0)
            tail.add(f" {answer}", ANSWER_WEIGHT)
    end = kit.encode("\n<|endoftext|>")
    told = sum(len(kit.encode(fact.told)) + 2 for fact in facts)
    room = length - tail.size - told - len(end) - 8
    builder = Builder(kit)
    if as_chat:
        builder.add("<|im_start|>user\n", 0.0)
    filler = kit.text(rng, max(8, room))
    with_facts(builder, filler, facts, [int(p) for p in rng.integers(0, len(filler), len(facts))])
    builder.ids += tail.ids
    builder.weights += tail.weights
    builder.size += tail.size
    builder.add(end, 0.0)
    while builder.size < length:
        builder.add(kit.text(rng, length - builder.size), TEXT_WEIGHT)
    return builder.row(length)


def registers(rng: Generator, length: int, kit: Kit, filler_share: float = 0.06) -> Row:
    """Eight variables set again and again, and read; only the latest value counts. Text stands between."""
    builder = Builder(kit)
    while builder.size < length:
        builder.add("Registers\n", 0.0)
        values: dict[str, int] = {}
        for _ in range(int(rng.integers(20, 400))):
            name = REGISTER_NAMES[rng.integers(len(REGISTER_NAMES))]
            if name in values and rng.random() < 0.4:
                builder.add(f"{name}?", 0.0)
                builder.add(f"{values[name]}", ANSWER_WEIGHT)
                builder.add("\n", 0.0)
            else:
                values[name] = int(rng.integers(10))
                builder.add(f"{name}={values[name]}\n", 0.0)
            if rng.random() < filler_share:
                builder.add(kit.text(rng, int(rng.integers(5, 60))), TEXT_WEIGHT)
                builder.add("\n", 0.0)
    return builder.row(length)


def walk(rng: Generator, length: int, kit: Kit) -> Row:
    """Steps on a track of eight cells with walls at both ends; the place depends on the steps' order."""
    builder = Builder(kit)
    while builder.size < length:
        builder.add("Walk\n", 0.0)
        place = 0
        for _ in range(int(rng.integers(20, 300))):
            step = 1 if rng.random() < 0.5 else -1
            place = min(WALK_CELLS - 1, max(0, place + step))
            builder.add("up\n" if step > 0 else "down\n", 0.0)
            if rng.random() < 0.4:
                builder.add("at", 0.0)
                builder.add(f" {place}", ANSWER_WEIGHT)
                builder.add("\n", 0.0)
    return builder.row(length)


def chat(rng: Generator, length: int, kit: Kit) -> Row:
    """Short conversations, one behind the other."""
    builder = Builder(kit)
    while builder.size < length:
        for piece in conversation(rng, kit.data.facts):
            builder.add(piece.text, CHAT_WEIGHT if piece.learned else 0.0)
        builder.add("<|endoftext|>", 0.0)
    return builder.row(length)


Task = Callable[[Generator, int, Kit], Row]
TASKS: dict[str, Task] = {
    "text": text,
    "copying": copying,
    "lookup": lookup,
    "recall": recall,
    "registers": registers,
    "walk": walk,
    "chat": chat,
}


class Batch(NamedTuple):
    """ids and weights are [rows, length]; tasks: [rows], each row's place in `TASKS`."""

    ids: Ids
    weights: Weights
    tasks: NDArray[np.int64]


def batch(rng: Generator, shares: dict[str, float], rows: int, length: int, kit: Kit) -> Batch:
    """`rows` rows of `length` tokens, the tasks drawn by `shares`."""
    names = list(TASKS)
    chosen = rng.choice(len(names), rows, p=[shares[name] for name in names])
    made = [TASKS[names[i]](rng, length, kit) for i in chosen]
    return Batch(np.stack([row.ids for row in made]), np.stack([row.weights for row in made]), chosen)
