"""Traces for the prefix cache: multi-turn chats, and agents whose history is trimmed.

The generators follow published descriptions of the workloads; every message consists of tokens that occur
nowhere else, so that two prompts agree exactly as far as their histories do.
"""

from __future__ import annotations

import math
import random
from array import array
from itertools import chain, count

from denim.cache.replay import TraceRequest

WORDS_PER_TOKEN = 0.75
WORDS_PER_SECOND = 1.5  # of a person who types
SESSIONS = 100
CHAT_SIGMA = 1.5  # with it the peers' rules come out as published on the real traces


class _Text:
    """Messages of fresh tokens."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self._next = count()

    def message(self, tokens: int) -> array:
        return array("i", [next(self._next) for _ in range(tokens)])

    def length(self, mean: float, sigma: float) -> int:
        """Lognormal with this mean."""
        return max(1, round(self.chance.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))


def chat(seed: int, user_mean: float, answer_mean: float, sessions: int = SESSIONS) -> list[TraceRequest]:
    """Sessions of ten and more turns, a new one every second; every turn appends to the history. The gap is
    the time that typing the next message takes."""
    text = _Text(seed)
    requests = []
    start = 0.0
    for _ in range(sessions):
        start += text.chance.expovariate(1.0)
        now, history = start, array("i")
        turns = 10 + int(text.chance.expovariate(1 / 6))
        for _ in range(turns):
            user = text.length(user_mean, CHAT_SIGMA)
            now += user * WORDS_PER_TOKEN / WORDS_PER_SECOND
            history = history + text.message(user)
            prompt = len(history)
            history = history + text.message(text.length(answer_mean, CHAT_SIGMA))
            requests.append(TraceRequest(now, history, prompt))
    return sorted(requests, key=lambda request: request.time)


def lmsys_like(seed: int) -> list[TraceRequest]:
    return chat(seed, 70, 215)


def sharegpt_like(seed: int) -> list[TraceRequest]:
    return chat(seed, 95, 350)


SYSTEM, ISSUE, ANSWER, OBSERVATION, ROUNDS, KEPT = 1200, 700, 180, 1100, 27, 5


def swe_like(seed: int, sessions: int = SESSIONS) -> list[TraceRequest]:
    """Agents on one system prompt. Observations older than five rounds are dropped from the history, so a
    late turn leaves its predecessor five rounds back."""
    text = _Text(seed)
    system = text.message(SYSTEM)
    requests = []
    start = 0.0
    for _ in range(sessions):
        start += text.chance.expovariate(1.0)
        now = start
        head = system + text.message(text.length(ISSUE, 0.5))
        answers: list[array] = []
        observations: list[array] = []
        for turn in range(ROUNDS):
            parts = [head]
            for at, (answer, observation) in enumerate(zip(answers, observations, strict=True)):
                parts += [answer, observation] if at >= turn - KEPT else [answer]
            prompt = array("i", chain.from_iterable(parts))
            answer = text.message(text.length(ANSWER, 0.5))
            requests.append(TraceRequest(now, prompt + answer, len(prompt)))
            answers.append(answer)
            observations.append(text.message(text.length(OBSERVATION, 1.1)))
            now += 5 + len(answer) / 30 + text.chance.expovariate(1 / 5)  # answering, and running a tool
    return sorted(requests, key=lambda request: request.time)
