"""What the plan promises against what the engine then holds: as many short requests at once as are planned.

    python -m bench.planned_against_real [--device cuda] [--memory-gib 60] [--tokens 100] [--json FILE]

Real requests of a short prompt and a long output, on random weights of Qwen3.5-0.8B's dimensions; they begin
in one step. In the step before they end all should be running, none should have given way, and the bytes of
their slots and pages should be the planned ones.
"""

from __future__ import annotations

from typing import Any

from bench.random_model import engine, spec_of
from bench.report import parser_of, write
from bench.rules.clock import need_gpu
from denim.ledger.devices import find_device
from denim.ledger.lengths import Lengths
from denim.memory.capacity_plan import CapacityPlan
from denim.memory.layout import PAGE, SLOT
from denim.sampling_params import SamplingParams

MODEL = "qwen3.5-0.8b"
GIB = 2**30
PLANNED_ON = {"cuda": "H200", "cpu": "CPU"}  # only sizes are compared, which are the same on every device


def rows(device: str, memory: int, tokens: int) -> list[dict[str, Any]]:
    """One row planned, one real."""
    spec = spec_of(MODEL, "bfloat16")
    plan = CapacityPlan.of(spec, find_device(PLANNED_ON[device]), memory=memory)
    holding = plan.holding(Lengths.fixed(tokens))
    planned = {
        "": "planned",
        "requests at once": holding.requests,
        "GiB of states": holding.state_bytes / GIB,
        "GiB of KV": holding.kv_bytes / GIB,
        "gave way": 0,
    }
    prompt = max(1, tokens // 10)
    core = engine(
        MODEL,
        "bfloat16",
        device,
        memory=memory,
        max_num_seqs=holding.requests,
        max_num_batched_tokens=holding.requests * prompt,
        max_model_len=tokens,
        enforce_eager=True,
    )
    params = SamplingParams(temperature=0, max_tokens=tokens - prompt, ignore_eos=True)
    for seed in range(holding.requests):
        core.add([(seed + place) % 1000 for place in range(prompt)], params)
    while True:
        stats = core.stats()
        if any(delta.finish_reason for delta in core.step()):
            break
    size = {name: core.layout.size_class(name).stride for name in (SLOT, PAGE)}
    real = {
        "": "real",
        "requests at once": stats["running"],
        "GiB of states": stats["slots"]["used"] * size[SLOT] / GIB,
        "GiB of KV": stats["pages"]["used"] * size[PAGE] / GIB,
        "gave way": stats["preempted_swap"] + stats["preempted_recompute"],
    }
    return [planned, real]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=list(PLANNED_ON), default="cuda")
    parser.add_argument("--memory-gib", type=float, default=60)
    parser.add_argument("--tokens", type=int, default=100)
    options = parser.parse_args()
    if options.device == "cuda":
        need_gpu()
    found = rows(options.device, int(options.memory_gib * GIB), options.tokens)
    write(options.json, options.device, found)


if __name__ == "__main__":
    main()
