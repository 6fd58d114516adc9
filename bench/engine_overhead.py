"""What the engine adds to the forward pass: everything else in a decode step of the embedded model.

    python -m bench.engine_overhead [--device cpu|cuda] [--batch 8] [--json FILE]

On a CPU a step's time less the time inside the model's forward and head: scheduling, packing, sampling, stop
rules, detokenisation. On a CUDA device, where steps overlap and are replayed from graphs, a step's time less
the time in waits for the device: all that the host does, launches among it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.report import write
from denim import SamplingParams
from denim.engine.core import EngineCore
from denim.engine.options import EngineOptions

STEPS = 200
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=STEPS + 8, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.7, top_p=0.9, top_k=40, max_tokens=STEPS + 8, ignore_eos=True),
}


class TimedModel:
    """The model, with the time spent in it added up."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.seconds = 0.0

    def _timed(self, call: Any, *args: Any) -> Any:
        begin = time.perf_counter()
        result = call(*args)
        self.seconds += time.perf_counter() - begin
        return result

    def __call__(self, *args: Any) -> Any:
        return self._timed(self.model, *args)

    def logits(self, hidden: Any) -> Any:
        return self._timed(self.model.logits, hidden)


class Waits:
    """Adds up the time that the host waits for events of the device."""

    def __init__(self) -> None:
        self.seconds = 0.0
        wait = torch.cuda.Event.synchronize

        def timed(event: torch.cuda.Event) -> None:
            begin = time.perf_counter()
            wait(event)
            self.seconds += time.perf_counter() - begin

        torch.cuda.Event.synchronize = timed  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    core = EngineCore(EngineOptions(device=args.device, memory="1GiB"))
    timed: TimedModel | Waits
    if args.device == "cuda":
        timed = Waits()
    else:
        timed = core.runner.forward.model = TimedModel(core.loaded.model)
    others = "forward ms" if args.device == "cpu" else "waiting ms"
    rows = []
    for name, params in PARAMS.items():
        for i in range(args.batch):
            core.add(f"Request number {i} says", params)
        core.step()
        outside, inside = [], []
        for _ in range(STEPS):
            timed.seconds = 0.0
            begin = time.perf_counter()
            core.step()
            outside.append(time.perf_counter() - begin - timed.seconds)
            inside.append(timed.seconds)
        for request_id in list(core.requests):
            core.abort(request_id)
        rows.append(
            {
                "sampling": name,
                "batch": args.batch,
                "host ms" if args.device == "cuda" else "outside forward ms": median(outside) * 1e3,
                others: median(inside) * 1e3,
            }
        )
    write(args.json, args.device, rows)


if __name__ == "__main__":
    main()
