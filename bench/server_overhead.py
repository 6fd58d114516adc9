"""What it costs to be served: the engine on one core, the server and a raw client on another, beside the
engine alone in one process on the same core.

    python -m bench.server_overhead [--streams 64] [--tokens 256] [--rounds 5] [--cores 0,1] [--json FILE]

The embedded model. Every round streams the same requests first through `LLM.generate` of a process pinned to
the first core, then through `denim serve`, whose engine is pinned to the first core too, and whose other
process shares the second core with the client. On a machine with other work the best rounds say more than the
median, and CPU time per token more than the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from statistics import median
from typing import Any

import psutil

from bench.raw_client import events, request, stream_all
from bench.report import parser_of, write
from bench.served import HOST, Served, cpu_seconds

OPTIONS: dict[str, Any] = {"device": "cpu", "memory": "256MiB", "max_model_len": 1024}  # of both engines
MODEL = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
ALONE = "--alone"  # the role of the process with the engine alone


def prompts(streams: int, place: int) -> list[str]:
    """About twenty tokens each, no two with a common beginning."""
    return [
        f"{place}.{i}: The President of the Senate said to the House that the year" for i in range(streams)
    ]


def serve_alone(streams: int, tokens: int) -> None:
    """Body of the process with the engine alone: a round for every line on stdin, its seconds on stdout."""
    import time

    from denim import LLM, SamplingParams

    llm = LLM(**OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    print(json.dumps(None), flush=True)
    for line in sys.stdin:
        begin, used = time.perf_counter(), time.process_time()
        outputs = llm.generate(prompts(streams, int(line)), params)
        seconds = [time.perf_counter() - begin, time.process_time() - used]
        assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
        print(json.dumps(seconds), flush=True)


class Alone:
    """A process with the engine alone, on one core."""

    def __init__(self, streams: int, tokens: int, core: int) -> None:
        command = ["-m", "bench.server_overhead", ALONE, f"--streams={streams}", f"--tokens={tokens}"]
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
        self._answer()

    def run(self, place: int) -> list[float]:
        """Wall and CPU seconds of one round."""
        assert self._process.stdin is not None
        print(place, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def served_round(served: Served, streams: int, tokens: int, place: int) -> dict[str, float]:
    """Wall seconds, and CPU seconds of engine, server and client, for one round over HTTP."""
    body = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    usage = {"stream_options": {"include_usage": True}}
    sent = [
        request("/v1/completions", {**body, **usage, "prompt": prompt, "model": "denim-tiny"})
        for prompt in prompts(streams, place)
    ]
    processes = {"engine": served.engine, "server": served.server, "client": psutil.Process()}
    before = {name: cpu_seconds(process) for name, process in processes.items()}
    streamed = stream_all((HOST, served.port), sent)
    used = {name: cpu_seconds(process) - before[name] for name, process in processes.items()}
    for answer in streamed.answers:
        assert events(answer)[-1]["usage"]["completion_tokens"] == tokens
    return {"wall": streamed.seconds, **used}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", default="0,1")
    parser.add_argument(ALONE, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if args.alone:
        serve_alone(args.streams, args.tokens)
        return
    first, second = map(int, args.cores.split(","))
    os.sched_setaffinity(0, {second})
    alone = Alone(args.streams, args.tokens, first)
    total = args.streams * args.tokens
    rows = []
    with Served(MODEL, cores=(second, first)) as served:
        for place in range(args.rounds + 1):  # the first one warms both up
            wall, cpu = alone.run(place)
            there = served_round(served, args.streams, args.tokens, place)
            if place:
                rows.append(
                    {
                        "alone tokens/s": total / wall,
                        "served tokens/s": total / there["wall"],
                        "served / alone": wall / there["wall"],
                        "alone CPU µs/token": cpu / total * 1e6,
                        **{
                            f"{name} CPU µs/token": there[name] / total * 1e6
                            for name in ("engine", "server", "client")
                        },
                    }
                )
    alone.close()
    middle = {name: median(row[name] for row in rows) for name in rows[0]}
    best = {name: (min if "CPU" in name else max)(row[name] for row in rows) for name in rows[0]}
    best["served / alone"] = best["served tokens/s"] / best["alone tokens/s"]
    rounds = [{"round": str(place), **row} for place, row in enumerate(rows, 1)]
    write(args.json, "cpu", [*rounds, {"round": "median", **middle}, {"round": "best", **best}])


if __name__ == "__main__":
    main()
