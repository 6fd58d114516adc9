"""A server in use by clients that leave at any moment: afterwards everything is as it was.

    python -m bench.server_soak [--requests 10000] [--at-once 64] [--seed 0] [--json FILE]

The embedded model behind `denim serve`. A third of the requests are aborted: the client hangs up after a
random time, before the first byte or in the middle of the answer. Requests are chats and completions,
streamed and not, with one or several choices, stop strings, logprobs, shared and own prompts. When all are
over, what the engine holds (slots, pages, slabs, queues), the server's tasks, open files and memory of both
processes are compared with what they were before; the prefix cache is emptied at both times. Exit code 1 if
something has not come back.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from typing import Any

from bench.raw_client import END, request
from bench.report import parser_of, write
from bench.served import HOST, Served

MODEL = ["--device", "cpu", "--memory", "64MiB", "--max-model-len", "1024"]
LEAVING = 0.44  # share of clients that do not mean to stay; one in four has its answer before it leaves
# Requests before the first look, all of them answered: buffers, code and allocators have grown to their size,
# and how long an answer takes is known, which is the longest that a leaving client stays.
WARM = 600
CALM = 10.0  # seconds in which everything must have come back
QUARTERS = 4  # of the requests, with a look after each: what leaks grows from look to look
# Memory may differ by so much: an allocator's holes come and go, and the largest requests that happen to meet
# leave theirs. Records left behind by the requests would be more.
SLACK_MIB = 32.0

SHARED = "You are the clerk of the Senate. Answer in the words of the annual messages. " * 4
OPENERS = ("The state of the Union", "Our commerce with foreign nations", "The public debt", "The army")


def one_request(chance: random.Random, place: int) -> bytes:
    """A request of a random kind."""
    body: dict[str, Any] = {
        "model": "denim-tiny",
        "max_tokens": chance.randrange(1, 48),
        "temperature": chance.choice((0, 0.8)),
        "seed": place,
        "stream": chance.random() < 0.7,
        "ignore_eos": True,
    }
    if chance.random() < 0.1:
        body["n"] = chance.randrange(2, 4)
    if chance.random() < 0.1:
        body["stop"] = [" of", "\n"]
    opener = chance.choice(OPENERS) if chance.random() < 0.5 else f"In the year {place}, before the House"
    text = (SHARED if chance.random() < 0.5 else "") + opener
    if chance.random() < 0.5:
        if chance.random() < 0.1:
            body |= {"logprobs": True, "top_logprobs": 2}
        body["messages"] = [{"role": "user", "content": text}]
        return request("/v1/chat/completions", body)
    body["prompt"] = text
    return request("/v1/completions", body)


async def ask(port: int, content: bytes, stay: float | None) -> str:
    """Send a request and read its answer, or hang up after `stay` seconds. How it ended."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(content)
        async with asyncio.timeout(stay):
            return await _answer(reader)
    except TimeoutError:
        return "aborted"
    finally:
        writer.transport.abort()


async def _answer(reader: asyncio.StreamReader) -> str:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    status = int(head.split()[1])
    if "chunked" in head:
        answer = b""
        while not answer.endswith(END):
            piece = await reader.read(65536)
            if not piece:
                return "cut"
            answer += piece
        whole = b"data: [DONE]" in answer and b'"error"' not in answer
    else:
        length = int(head.split("content-length:")[1].split()[0])
        whole = bool(json.loads(await reader.readexactly(length)).get("choices"))
    return "answered" if status == 200 and whole else f"status {status}"


async def load(port: int, places: range, at_once: int, seed: int, longest_stay: float | None) -> Counter[str]:
    """Send the requests `places`, so many at once; how they ended. Some clients leave within `longest_stay`
    seconds; None: nobody leaves."""
    ends: Counter[str] = Counter()
    left = iter(places)

    async def client() -> None:
        for place in left:
            chance = random.Random(f"{seed}.{place}")
            stay = None
            if longest_stay is not None and chance.random() < LEAVING:
                stay = chance.uniform(0, longest_stay)
            ends[await ask(port, one_request(chance, place), stay)] += 1

    await asyncio.gather(*(client() for _ in range(at_once)))
    return ends


def look(served: Served) -> dict[str, float]:
    """What is held now, with an empty prefix cache."""
    served.post("/reset_prefix_cache")
    stats = json.loads(served.get("/stats")[1])
    held = {f"{kind} in use": stats[kind]["used"] for kind in ("slots", "pages", "slabs")}
    held |= {f"{kind} free": stats[kind]["free"] for kind in ("slots", "pages", "slabs")}
    held |= {queue: stats[queue] for queue in ("running", "waiting", "swapped")}
    metrics = served.get("/metrics")[1].decode().splitlines()
    for name in ("denim_server_tasks", "denim_completions_in_work", "denim_engine_crashes_total"):
        (line,) = [line for line in metrics if line.startswith(f"{name} ")]
        held[name] = float(line.split()[1])
    for name, process in (("server", served.server), ("engine", served.engine)):
        held[f"{name}: open files"] = process.num_fds()
        held[f"{name}: memory MiB"] = process.memory_info().rss / 2**20
    return held


def changed(before: dict[str, float], now: dict[str, float]) -> list[str]:
    """Names of what has not come back."""
    return [
        name
        for name in before
        if (now[name] > before[name] + SLACK_MIB if "MiB" in name else now[name] != before[name])
    ]


def calm(served: Served, before: dict[str, float]) -> dict[str, float]:
    """Look until everything is back, or time is up."""
    patience = time.monotonic() + CALM
    while changed(before, now := look(served)) and time.monotonic() < patience:
        time.sleep(0.2)
    return now


def soak(served: Served, requests: int, at_once: int, seed: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of the table, and what has not come back."""
    begin = time.monotonic()
    warm = asyncio.run(load(served.port, range(WARM), at_once, seed, None))
    answer_seconds = at_once * (time.monotonic() - begin) / WARM  # Little's law
    time.sleep(1)
    looks = {"before": look(served)}
    ends: Counter[str] = Counter()
    seconds = 0.0
    for quarter in range(1, QUARTERS + 1):
        first, last = (requests * part // QUARTERS for part in (quarter - 1, quarter))
        begin = time.monotonic()
        ends += asyncio.run(
            load(served.port, range(WARM + first, WARM + last), at_once, seed, answer_seconds)
        )
        seconds += time.monotonic() - begin
        looks[f"after {last}"] = calm(served, looks["before"])
    ended = ", ".join(f"{count} {end}" for end, count in ends.most_common())
    print(f"{requests} requests, {at_once} at once, in {seconds:.0f} s: {ended}\n")
    rows = [{"what": name, **{at: held[name] for at, held in looks.items()}} for name in looks["before"]]
    bad = changed(looks["before"], looks[f"after {requests}"])
    return rows, bad + [end for end in warm | ends if end not in ("answered", "aborted")]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with Served(MODEL) as served:
        rows, bad = soak(served, args.requests, args.at_once, args.seed)
    write(args.json, "cpu", rows)
    if bad:
        sys.exit(f"\nnot as before: {', '.join(bad)}")


if __name__ == "__main__":
    main()
