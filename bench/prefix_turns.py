"""Turns of conversations that grow, each with as many new tokens: late turns against the first.

    python -m bench.prefix_turns [--model qwen3.5-0.8b|tiny] [--device cpu|cuda] [--new 128] [--json FILE]

Random weights of published dimensions, or denim-tiny. A turn appends a question to all that was said;
what stands before it is reused, so only the new tokens are computed, which is asserted. On a CPU the time
is the processor's, which another job on the machine does not change as much.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from bench.engine_steps import prompt_of
from bench.random_model import engine
from bench.report import parser_of, write
from denim.engine.core import EngineCore
from denim.engine.options import EngineOptions
from denim.sampling_params import SamplingParams

CONVERSATIONS, TURNS = 8, 6
ANSWER = 8  # tokens


def open_core(model: str, device: str, memory: str, longest: int) -> EngineCore:
    options: dict[str, Any] = {"memory": memory, "max_model_len": longest, "checkpoint_policy": "auto"}
    if model == "tiny":
        return EngineCore(EngineOptions.of(device=device, **options))
    return engine(model, "bfloat16", device, **options)


def drawn(core: EngineCore, tokens: int, seed: int) -> list[int]:
    return [token % core.spec.vocab_size for token in prompt_of(tokens, seed)]


def turn(core: EngineCore, prompt: list[int], known: int) -> tuple[list[int], float]:
    """The prompt with its answer, and the seconds to the first token. `known` tokens must be reused."""
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    now = time.perf_counter if core.loaded.device.type == "cuda" else time.process_time
    begin = now()
    output = core.requests[core.add(prompt, params)].output
    while not output.outputs[0].token_ids:
        core.step()
    seconds = now() - begin
    while core.has_work:
        core.step()
    core.settle()
    assert output.num_cached_tokens == known, (output.num_cached_tokens, known)
    return [*prompt, *output.outputs[0].token_ids], seconds


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="qwen3.5-0.8b")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory", default="3GiB")
    parser.add_argument("--new", type=int, default=128, help="tokens that each turn computes")
    args = parser.parse_args()
    core = open_core(args.model, args.device, args.memory, TURNS * (args.new + ANSWER) + 1)
    turn(core, drawn(core, args.new, 10**6), 0)  # first calls allocate and choose kernels
    seconds: list[list[float]] = [[] for _ in range(TURNS)]
    for conversation in range(CONVERSATIONS):
        history: list[int] = []
        for number in range(TURNS):
            known = max(0, len(history) - 1)  # the last token was drawn, and never applied
            new = args.new if not history else args.new - 1
            prompt = history + drawn(core, new, 100 * conversation + number)
            history, first = turn(core, prompt, known)
            seconds[number].append(first)
    rows = [
        {
            "turn": number + 1,
            "prompt": (number + 1) * args.new + number * (ANSWER - 1),
            "cached": number * (args.new + ANSWER - 1),
            "ms to the first token": 1e3 * median(times),
            "times the first turn's": median(times) / median(seconds[0]),
        }
        for number, times in enumerate(seconds)
    ]
    write(args.json, args.device, rows)


if __name__ == "__main__":
    main()
