"""What the prefix cache is worth in the engine: first tokens behind a shared prefix, and turns of a chat.

    python -m bench.prefix_engine [--device cpu|cuda] [--shared 4096] [--own 128] [--requests 32]

Random weights of published dimensions. Beside every row stands the same work without a cache, in one run:
the same prompts computed whole.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from bench.engine_steps import prompt_of
from bench.random_model import engine
from bench.report import parser_of, write
from denim.engine.core import EngineCore
from denim.sampling_params import SamplingParams

FIRST = SamplingParams(temperature=0, max_tokens=1)
ROUNDS = 5
# A conversation: tokens of the first prompt, of the answer, and of what the second turn adds.
FIRST_TURN, ANSWER, QUESTION = 3000, 100, 128


def first_tokens(core: EngineCore, prompts: list[list[int]]) -> tuple[float, int]:
    """Seconds until every one of `prompts`, which arrive together, has its first token; and how many of their
    tokens were cached, on average."""
    begin = time.perf_counter()
    outputs = [core.requests[core.add(prompt, FIRST)].output for prompt in prompts]
    while core.has_work:
        core.step()
    seconds = time.perf_counter() - begin
    core.settle()
    return seconds, sum(output.num_cached_tokens for output in outputs) // len(outputs)


def behind(shared: list[int], own: int, seed: int) -> list[int]:
    return shared + prompt_of(own, seed=1000 + seed)


def answered(core: EngineCore, prompt: list[int]) -> list[int]:
    """The prompt and an answer to it."""
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    output = core.requests[core.add(prompt, params)].output
    while core.has_work:
        core.step()
    core.settle()
    return [*prompt, *output.outputs[0].token_ids]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="qwen3.5-0.8b")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory", default="2GiB")
    parser.add_argument("--shared", type=int, default=4096)
    parser.add_argument("--own", type=int, default=128)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    longest = max(args.shared + args.own, FIRST_TURN + ANSWER + QUESTION) + 1
    options = {"memory": args.memory, "max_model_len": longest, "max_num_seqs": args.requests}
    warm, cold = (
        engine(args.model, "bfloat16", args.device, checkpoint_policy=policy, **options)
        for policy in ("auto", "none")
    )
    shared = prompt_of(args.shared)
    seeds = iter(range(10**6))
    rows: list[dict[str, Any]] = []

    def measure(name: str, prompts_of: Any) -> None:
        """Fresh prompts in every round, the same ones for both."""
        ours, theirs, cached = [], [], 0
        for _ in range(args.rounds):
            prompts = prompts_of()
            seconds, cached = first_tokens(warm, prompts)
            ours.append(seconds)
            theirs.append(first_tokens(cold, prompts)[0])
        rows.append(
            {
                "measure": name,
                "prompt": len(prompts[0]),
                "cached": cached,
                "warm ms": 1e3 * median(ours),
                "cold ms": 1e3 * median(theirs),
                "times": median(theirs) / median(ours),
            }
        )
        print(rows[-1], flush=True)

    for core in (warm, cold):  # sightings one and two; graphs and allocators are warm then
        for _ in range(2):
            first_tokens(core, [behind(shared, args.own, next(seeds))])
    measure("alone, third sighting on", lambda: [behind(shared, args.own, next(seeds))])
    again = behind(shared, args.own, next(seeds))
    first_tokens(warm, [again])
    measure("the same prompt again", lambda: [again])
    measure(
        f"{args.requests} at once",
        lambda: [behind(shared, args.own, next(seeds)) for _ in range(args.requests)],
    )
    measure(
        "second turn",
        lambda: [answered(warm, prompt_of(FIRST_TURN, next(seeds))) + prompt_of(QUESTION, next(seeds))],
    )
    write(args.json, args.device, rows)


if __name__ == "__main__":
    main()
