"""What a prefix costs when it comes up from host memory or from files, and what others notice of it.

    python -m bench.prefix_tiers [--device cpu|cuda] [--lengths 1024,4096,16384] [--directory DIR]

Random weights of published dimensions. First tokens of one request, alone: its prefix on the device, in host
memory, in files, or computed; and the steps of other requests that decode meanwhile.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench.engine_steps import prompt_of
from bench.prefix_engine import FIRST, behind, first_tokens
from bench.random_model import engine
from bench.report import parser_of, write
from denim.engine.core import EngineCore
from denim.sampling_params import SamplingParams

OWN = 32  # tokens behind the prefix
OTHERS = 8  # requests that decode meanwhile
QUIET_STEPS = 20


def push_out(core: EngineCore, to_files: bool = False) -> None:
    """All checkpoints leave the device, and with `to_files` host memory too."""
    cache, tiers = core.scheduler.prefixes.cache, core.scheduler.prefixes.tiers
    assert cache is not None and tiers is not None
    cache.evict_all()
    first_tokens(core, [[1, 2]])  # they leave at the head of a step
    if to_files:
        tiers.push_down()


def steps_of_others(core: EngineCore, prompt: list[int] | None) -> list[float]:
    """Seconds of each step while `OTHERS` decode; with `prompt` until its first token, which a request asks
    for that arrives among them."""
    others = [
        core.add(prompt_of(64, 500 + i), SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True))
        for i in range(OTHERS)
    ]
    for _ in range(QUIET_STEPS):
        core.step()
    id_ = None if prompt is None else core.add(prompt, FIRST)
    times = []
    while len(times) < QUIET_STEPS or id_ in core.requests:
        begin = time.perf_counter()
        core.step()
        times.append(time.perf_counter() - begin)
    for other in others:
        core.abort(other)
    core.settle()
    return times


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="qwen3.5-0.8b")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory", default="2GiB")
    parser.add_argument("--host-memory", default="2GiB")
    parser.add_argument("--lengths", default="1024,4096,16384")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--checkpoint-dtype", default="auto")
    parser.add_argument("--directory", type=Path, help="of the files; a temporary one where it is not given")
    args = parser.parse_args()
    lengths = [int(text) for text in args.lengths.split(",")]
    options = {"memory": args.memory, "max_model_len": max(lengths) + OWN + 1, "max_num_seqs": 16}
    cold = engine(args.model, "bfloat16", args.device, checkpoint_policy="none", **options)
    with tempfile.TemporaryDirectory() as folder:
        core = engine(
            args.model,
            "bfloat16",
            args.device,
            host_memory=args.host_memory,
            checkpoint_dtype=args.checkpoint_dtype,
            disk_cache=args.directory or folder,
            checkpoint_policy="auto",
            **options,
        )
        rows = [measure(core, cold, length, args.rounds) for length in lengths]
        core.close()
    write(args.json, args.device, rows)


def measure(core: EngineCore, cold: EngineCore, length: int, rounds: int) -> dict[str, Any]:
    """One row: milliseconds, the median of `rounds`."""
    tiers = core.scheduler.prefixes.tiers
    assert tiers is not None
    tiers.pays = lambda start, end, nbytes, tier: True
    shared = prompt_of(length, seed=length)
    seeds = iter(range(10**6))
    first_tokens(core, [shared])
    first_tokens(cold, [behind(shared, OWN, 10**6)])
    ways: dict[str, list[float]] = {"device": [], "host": [], "files": [], "computed": []}
    for _ in range(rounds):
        prompt = behind(shared[:-1], OWN, next(seeds))
        for way, times in ways.items():
            if way in ("host", "files"):
                push_out(core, way == "files")
            seconds, cached = first_tokens(cold if way == "computed" else core, [prompt])
            assert cached == (0 if way == "computed" else length - 1), (way, cached)
            times.append(seconds)
            prompt = behind(shared[:-1], OWN, next(seeds))
    push_out(core)
    quiet = steps_of_others(core, None)
    push_out(core)
    loading = steps_of_others(core, behind(shared[:-1], OWN, next(seeds)))
    computing = steps_of_others(cold, behind(shared[:-1], OWN, next(seeds)))
    row = {"prefix": length, **{f"{way} ms": 1e3 * median(times) for way, times in ways.items()}}
    row |= {"step ms": 1e3 * median(quiet), "longest step ms, quiet": 1e3 * max(quiet)}
    row |= {"loading": 1e3 * max(loading), "computing": 1e3 * max(computing)}
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
