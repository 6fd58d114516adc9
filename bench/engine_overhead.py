"""What the engine adds to the forward pass: everything else in a decode step.

    python -m bench.engine_overhead [--model qwen3.5-0.8b] [--device cpu|cuda] [--batch 8] [--json FILE]

Of the embedded model, or of random weights of published dimensions (bench/configs), which have no tokenizer.

On a CPU a step's time less the time inside the model's forward and head: scheduling, packing, sampling, stop
rules, detokenisation. On a CUDA device, where steps overlap and are replayed from graphs, a step's time less
the time in waits for the device, and apart from it what CUDA takes to launch the step's graph.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.random_model import engine
from bench.report import write
from denim import SamplingParams
from denim.engine.core import EngineCore
from denim.engine.options import EngineOptions
from denim.runner.landing import Draw

STEPS = 200
WARM_STEPS = 4  # prefill, and what is made once for a batch
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=STEPS + 8, ignore_eos=True),
    "greedy, token ids": SamplingParams(
        temperature=0, max_tokens=STEPS + 8, ignore_eos=True, detokenize=False
    ),
    "sampled": SamplingParams(temperature=0.7, top_p=0.9, top_k=40, max_tokens=STEPS + 8, ignore_eos=True),
    "sampled, token ids": SamplingParams(
        temperature=0.7, top_p=0.9, top_k=40, max_tokens=STEPS + 8, ignore_eos=True, detokenize=False
    ),
}


def engine_of(model: str | None, device: str) -> EngineCore:
    if model is None:
        return EngineCore(EngineOptions(device=device, memory="1GiB"))
    dtype = "bfloat16" if device == "cuda" else "float32"
    return engine(model, dtype, device, memory="8GiB", max_model_len=4096)


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


class DeviceCalls:
    """Adds up the time that the host waits for tokens (`seconds`), and that it takes to launch graphs
    (`launching`)."""

    def __init__(self) -> None:
        self.seconds = self.launching = 0.0
        wait, replay = Draw.wait, torch.cuda.CUDAGraph.replay

        def timed_wait(draw: Draw) -> None:
            begin = time.perf_counter()
            wait(draw)
            self.seconds += time.perf_counter() - begin

        def timed_replay(graph: torch.cuda.CUDAGraph) -> None:
            begin = time.perf_counter()
            replay(graph)
            self.launching += time.perf_counter() - begin

        Draw.wait = timed_wait  # type: ignore[method-assign]
        torch.cuda.CUDAGraph.replay = timed_replay  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="one of bench/configs; without it the embedded model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cuda = args.device == "cuda"
    core = engine_of(args.model, args.device)
    timed: Any = DeviceCalls() if cuda else TimedModel(core.loaded.model)
    if not cuda:
        core.runner.forward.model = timed
    rows = []
    for name, params in PARAMS.items():
        if params.detokenize and core.tokenizer is None:
            continue
        for i in range(args.batch):
            core.add([100 + i, *range(200, 205)], params)
        for _ in range(WARM_STEPS):
            core.step()
        outside, inside, launching = [], [], []
        for _ in range(STEPS):
            timed.seconds = 0.0
            if cuda:
                timed.launching = 0.0
            begin = time.perf_counter()
            core.step()
            outside.append(time.perf_counter() - begin - timed.seconds)
            inside.append(timed.seconds)
            launching.append(timed.launching if cuda else 0.0)
        for request_id in list(core.requests):
            core.abort(request_id)
        row: dict[str, Any] = {"model": core.loaded.name, "sampling": name, "batch": args.batch}
        if cuda:
            python = [all_ - launch for all_, launch in zip(outside, launching, strict=True)]
            row |= {"python ms": median(python) * 1e3, "graph launch ms": median(launching) * 1e3}
            row["waiting ms"] = median(inside) * 1e3
        else:
            row |= {"outside forward ms": median(outside) * 1e3, "forward ms": median(inside) * 1e3}
        rows.append(row)
    write(args.json, args.device, rows)


if __name__ == "__main__":
    main()
