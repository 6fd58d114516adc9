"""Short conversations whose answers are known: meanings, countries, sums, dates, words, names.

Owns the questions, the answers, and what is thought before an answer. Knows the chat template's text form,
not tokens. `render` is checked against chat_template.jinja by a test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from numpy.random import Generator

from training.data import Facts
from training.words import DAYS, MONTH_DAYS, MONTHS, NAMES, NOUNS, NUMBERS

MOST_TURNS = 4
THINKING_SHARE = 0.4
SYSTEM_SHARE = 0.3
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are denim-tiny, a small language model.",
    "Answer in one short sentence.",
)


class Turn(NamedTuple):
    """One question, what is thought about it, and the answer."""

    user: str
    thinking: str
    answer: str


class Piece(NamedTuple):
    """A stretch of a conversation's text; `learned` if it is the model's to write."""

    text: str
    learned: bool


def _pick(rng: Generator, options: tuple[str, ...] | list[str]) -> str:
    return options[int(rng.integers(len(options)))]


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _meaning(rng: Generator, facts: Facts) -> Turn:
    word, part, gloss = facts.meanings[int(rng.integers(len(facts.meanings)))]
    if rng.random() < 0.12:
        user = _pick(rng, (f"Which {part} means: {gloss}?", f"What is the word for this: {gloss}?"))
        return Turn(user, f"The user wants {_article(part)} {part}.", f"The word is {word}.")
    user = _pick(
        rng,
        (
            f"What does {word} mean?",
            f"What does the word {word} mean?",
            f"Define {word}.",
            f"What is the meaning of {word}?",
            f'What does "{word}" mean?',
            f"Explain the word {word}.",
        ),
    )
    return Turn(
        user,
        f"The word {word} is {_article(part)} {part}.",
        f"As {_article(part)} {part}, {word} means {gloss}.",
    )


def _country(rng: Generator, facts: Facts) -> Turn:
    name = _pick(rng, list(facts.countries))
    known = facts.countries[name]
    key = _pick(rng, list(known))
    value = known[key]
    if key == "capital":
        user = _pick(rng, (f"What is the capital of {name}?", f"Which city is the capital of {name}?"))
        return Turn(user, f"The question is about {name}.", f"The capital of {name} is {value}.")
    if key == "region":
        user = _pick(rng, (f"Where is {name}?", f"In which part of the world is {name}?"))
        return Turn(user, f"The question is about {name}.", f"{name} is in this region: {value}.")
    user = _pick(rng, (f"Which language is spoken in {name}?", f"What do people speak in {name}?"))
    return Turn(user, f"The question is about {name}.", f"A language spoken in {name} is {value}.")


def _sum(rng: Generator, facts: Facts) -> Turn:
    a, b = (int(x) for x in rng.integers(0, 100, 2))
    user = _pick(rng, (f"What is {a} + {b}?", f"What is {a} plus {b}?", f"Add {a} and {b}."))
    ones = a % 10 + b % 10
    tens = a // 10 + b // 10 + ones // 10
    thinking = f"{a % 10} + {b % 10} = {ones}. {a // 10} + {b // 10} + {ones // 10} = {tens}."
    return Turn(user, thinking, f"{a} + {b} = {a + b}.")


def _difference(rng: Generator, facts: Facts) -> Turn:
    b, a = sorted(int(x) for x in rng.integers(0, 100, 2))
    user = _pick(rng, (f"What is {a} - {b}?", f"What is {a} minus {b}?", f"Subtract {b} from {a}."))
    return Turn(user, f"{b} + {a - b} = {a}.", f"{a} - {b} = {a - b}.")


def _product(rng: Generator, facts: Facts) -> Turn:
    a, b = (int(x) for x in rng.integers(0, 13, 2))
    user = _pick(rng, (f"What is {a} * {b}?", f"What is {a} times {b}?", f"Multiply {a} by {b}."))
    return Turn(user, f"This is {a} times {b}.", f"{a} * {b} = {a * b}.")


def _larger(rng: Generator, facts: Facts) -> Turn:
    a, b = (int(x) for x in rng.choice(1000, 2, replace=False))
    word, answer = ("larger", max(a, b)) if rng.random() < 0.5 else ("smaller", min(a, b))
    return Turn(f"Which is {word}, {a} or {b}?", f"Compare {a} and {b}.", f"{answer} is {word}.")


def _day(rng: Generator, facts: Facts) -> Turn:
    start, steps = int(rng.integers(7)), int(rng.integers(1, 7))
    sign, word = (1, "after") if rng.random() < 0.5 else (-1, "before")
    path = ", ".join(DAYS[(start + sign * i) % 7] for i in range(1, steps + 1))
    end = DAYS[(start + sign * steps) % 7]
    if steps == 1:
        return Turn(f"What day comes {word} {DAYS[start]}?", f"{path}.", f"{end} comes {word} {DAYS[start]}.")
    user = f"What day is {NUMBERS[steps]} days {word} {DAYS[start]}?"
    return Turn(user, f"{path}.", f"It is {end}.")


def _month(rng: Generator, facts: Facts) -> Turn:
    month = int(rng.integers(12))
    if rng.random() < 0.5:
        answer = f"{MONTHS[month]} has {MONTH_DAYS[month]} days."
        return Turn(
            f"How many days are in {MONTHS[month]}?", f"{MONTHS[month]} is month {month + 1}.", answer
        )
    sign, word = (1, "after") if rng.random() < 0.5 else (-1, "before")
    answer = f"{MONTHS[(month + sign) % 12]} comes {word} {MONTHS[month]}."
    return Turn(
        f"Which month comes {word} {MONTHS[month]}?", f"{MONTHS[month]} is month {month + 1}.", answer
    )


def _spelling(rng: Generator, facts: Facts) -> Turn:
    word = (
        facts.meanings[int(rng.integers(len(facts.meanings)))][0] if rng.random() < 0.5 else _pick(rng, NOUNS)
    )
    letters = "-".join(word)
    if rng.random() < 0.5:
        return Turn(
            _pick(rng, (f"Spell {word}.", f"How do you spell {word}?")), f"The word is {word}.", f"{letters}."
        )
    return Turn(
        f"How many letters does {word} have?", f"{letters}.", f"The word {word} has {len(word)} letters."
    )


def _repeat(rng: Generator, facts: Facts) -> Turn:
    words = [_pick(rng, NOUNS) for _ in range(int(rng.integers(1, 8)))]
    if rng.random() < 0.5:
        return Turn(f"Repeat after me: {' '.join(words)}", "I repeat the words.", " ".join(words))
    return Turn(
        f"Say these words backwards: {' '.join(words)}",
        f"The last word is {words[-1]}.",
        " ".join(words[::-1]),
    )


def _count(rng: Generator, facts: Facts) -> Turn:
    start = int(rng.integers(0, 90))
    end = start + int(rng.integers(2, 12))
    answer = ", ".join(str(i) for i in range(start, end + 1))
    return Turn(f"Count from {start} to {end}.", f"I start at {start} and stop at {end}.", f"{answer}.")


def _greeting(rng: Generator, facts: Facts) -> Turn:
    user, answer = (
        ("Hello!", "Hello! How can I help you?"),
        ("Hi", "Hello! How can I help you?"),
        ("Good morning.", "Good morning! How can I help you?"),
        ("How are you?", "I am fine, thank you. How can I help you?"),
        ("Thank you.", "You are welcome."),
        ("Thanks!", "You are welcome."),
        ("Who are you?", "I am denim-tiny, a small language model."),
        ("What are you?", "I am denim-tiny, a small language model."),
        ("What is your name?", "My name is denim-tiny."),
        (
            "What can you do?",
            "I can explain words, name capitals, add numbers and remember what you tell me.",
        ),
        ("Goodbye.", "Goodbye!"),
    )[int(rng.integers(11))]
    return Turn(user, "The user is talking to me.", answer)


KINDS: tuple[tuple[float, Callable[[Generator, Facts], Turn]], ...] = (
    (0.36, _meaning),
    (0.16, _country),
    (0.09, _sum),
    (0.05, _difference),
    (0.05, _product),
    (0.03, _larger),
    (0.05, _day),
    (0.04, _month),
    (0.05, _spelling),
    (0.05, _repeat),
    (0.03, _count),
    (0.04, _greeting),
)


def render(system: str, turns: list[Turn], thinking: bool) -> list[Piece]:
    """A conversation as the template renders it; the last answer is the model's to write.

    Earlier answers stand without their thinking. `system` may be "".
    """
    text = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    for turn in turns[:-1]:
        text += f"<|im_start|>user\n{turn.user}<|im_end|>\n<|im_start|>assistant\n{turn.answer}<|im_end|>\n"
    last = turns[-1]
    text += f"<|im_start|>user\n{last.user}<|im_end|>\n<|im_start|>assistant\n<think>\n"
    if thinking:
        return [
            Piece(text, False),
            Piece(f"{last.thinking}\n</think>\n\n{last.answer}<|im_end|>", True),
            Piece("\n", False),
        ]
    return [
        Piece(text + "\n</think>\n\n", False),
        Piece(f"{last.answer}<|im_end|>", True),
        Piece("\n", False),
    ]


def conversation(rng: Generator, facts: Facts) -> list[Piece]:
    """A random conversation of one to four turns."""
    shares = [share for share, _ in KINDS]
    turns = []
    name = _pick(rng, NAMES) if rng.random() < 0.1 else ""
    if name:
        user = _pick(rng, (f"My name is {name}.", f"Hello, I am {name}.", f"Hi, my name is {name}."))
        turns.append(Turn(user, f"The user's name is {name}.", f"Nice to meet you, {name}."))
    for _ in range(int(rng.choice(MOST_TURNS, p=(0.6, 0.2, 0.1, 0.1))) + 1):
        turns.append(KINDS[int(rng.choice(len(KINDS), p=shares))][1](rng, facts))
    if name:
        turns.append(Turn("What is my name?", f"The user said: my name is {name}.", f"Your name is {name}."))
    system = _pick(rng, SYSTEMS) if rng.random() < SYSTEM_SHARE else ""
    return render(system, turns, rng.random() < THINKING_SHARE)
