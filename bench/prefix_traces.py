"""Traces for the prefix cache: multi-turn chats, agents whose history is trimmed, and a recorded one.

The generators follow published descriptions of the workloads; every message consists of tokens that occur
nowhere else, so that two prompts agree exactly as far as their histories do.
"""

from __future__ import annotations

import json
import math
import random
from array import array
from itertools import accumulate, chain, count
from pathlib import Path

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


BLOCK = 512  # tokens of a block in the recorded trace
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


def recorded(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """A trace in Mooncake's format: timestamp (ms), input_length, output_length, hash_ids of 512 tokens each.

    Equal ids stand for equal content; the last one covers the rest of the prompt. A request whose full
    blocks begin a later, longer one is its earlier turn: that one goes on with the rest of this prompt and
    this answer. An answer that no later request goes on with has tokens of its own.
    """
    entries = [json.loads(line) for line in path.open()][:limit]
    fresh = count(1 << 30)
    later: dict[int, int] = {}  # hash of a chain of blocks -> the next request that has it
    follower: list[int | None] = [None] * len(entries)
    for at in range(len(entries) - 1, -1, -1):
        entry = entries[at]
        length = entry["input_length"] + entry["output_length"]
        chained = list(accumulate(entry["hash_ids"], lambda chain, block: hash((chain, block)), initial=0))
        full = entry["input_length"] // BLOCK
        candidate = later.get(chained[full])
        if full and candidate is not None and entries[candidate]["input_length"] >= length:
            follower[at] = candidate
        later.update(dict.fromkeys(chained[1:], at))
    requests: list[TraceRequest] = []
    prompts: list[array] = [array("i")] * len(entries)
    for at in range(len(entries) - 1, -1, -1):
        entry = entries[at]
        length, answer = entry["input_length"], max(1, entry["output_length"])
        next_turn = follower[at]
        if next_turn is not None:
            tokens = prompts[next_turn][: length + answer]
        else:
            tokens = array("i")
            for block_id in entry["hash_ids"]:
                tokens.extend(range(block_id * BLOCK, (block_id + 1) * BLOCK))
            tokens = tokens[:length] + array("i", [next(fresh) for _ in range(answer)])
        prompts[at] = tokens[:length]
        requests.append(TraceRequest(entry["timestamp"] / 1000, tokens, length))
    return requests[::-1]
