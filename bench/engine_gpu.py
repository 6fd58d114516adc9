"""Denim on one CUDA device at published dimensions with random bf16 weights, fp32 states.

    python -m bench.engine_gpu [--model qwen3.5-0.8b] [--json FILE] [--no-peer] [--eager]

Each row stands beside the floor: the bytes of weights and states that a decode step must move at the device's
measured copy bandwidth, or the FLOPs of a prefill at its measured rate of bf16 products; beside transformers
on the same card, in the same run, where it can do the same work; and, for the model that it was measured
with, beside vLLM on another card of the same kind (`VLLM`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from bench.engine_steps import denim_decode, denim_prefill, denim_throughput, peer_decode, peer_prefill
from bench.random_model import engine, peer_model
from bench.report import parser_of, write
from bench.rules.clock import floors
from denim.engine.core import EngineCore
from denim.ledger.cost import ledger_of
from denim.ledger.flops import prefill_flops
from denim.ledger.parameters import weight_bytes
from denim.spec.model import ModelSpec

STEPS = 40
ROUNDS = 3

# vLLM 0.25.1 on one H200, Qwen3.5-0.8B dimensions, random bf16 weights, fp32 states, 16 host cores; the
# better of its two runners in milliseconds. Measured 2026-11-30 with torch 2.11.
VLLM = {
    "decode step, batch 1, context 1024": 2.06,
    "decode step, batch 32, context 192": 4.14,
    "decode step, batch 256, context 192": 10.7,
    "TTFT, prompt 1024": 28.0,
    "TTFT, prompt 8192": 38.1,
    "TTFT, prompt 32768": 155.0,
    "256 x (1024 + 128), all at once": 256 * 128 / 13_400 * 1e3,
    "start-up to the first token": 92_000.0,
}
VLLM_MODEL = "qwen3.5-0.8b"


def decode_floor(spec: ModelSpec, batch: int, context: int, bandwidth: float) -> float:
    """Seconds: weights once, states read and written, KV read, windows left out."""
    ledger = ledger_of(spec)
    kv = context * ledger.kv_bytes_per_token
    return (weight_bytes(spec) + batch * (2 * ledger.state_bytes + kv)) / bandwidth


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="qwen3.5-0.8b")
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument("--eager", action="store_true", help="without captured graphs")
    args = parser.parse_args()

    bandwidth, rate = floors()
    print(f"copy {bandwidth / 1e9:.0f} GB/s, bf16 products {rate / 1e12:.0f} TFLOP/s")

    def open_core(**options: Any) -> EngineCore:
        limits = {"max_model_len": 40_000, "memory": "40GiB", "enforce_eager": args.eager}
        return engine(args.model, "bfloat16", "cuda", **limits, **options)

    begin = time.perf_counter()
    core = open_core()
    first = denim_prefill(core, 16)
    startup = time.perf_counter() - begin
    print(f"started in {startup:.1f} s, the first token took {first * 1e3:.0f} ms of it", flush=True)
    spec = core.spec
    peer = None if args.no_peer else peer_model(args.model, "bfloat16", "cuda")

    vllm = VLLM if args.model == VLLM_MODEL else {}
    rows: list[dict[str, Any]] = []

    def measure(
        name: str,
        ours: Callable[[], float],
        tokens: int,
        floor: float,
        theirs: Callable[[], float] | None = None,
        rounds: int = ROUNDS,
    ) -> None:
        ours()
        seconds = median(ours() for _ in range(rounds))
        row = {"measure": name, "denim ms": seconds * 1e3, "denim tok/s": tokens / seconds}
        row["floor ms"] = floor * 1e3
        row["times the floor"] = seconds / floor
        row["vLLM ms"] = vllm.get(name, "-")
        row["transformers ms"] = "-"
        if peer is not None and theirs is not None:
            theirs()
            row["transformers ms"] = median(theirs() for _ in range(rounds)) * 1e3
        rows.append(row)
        print(row, flush=True)

    for batch, context in ((1, 1024), (32, 192), (256, 192)):
        measure(
            f"decode step, batch {batch}, context {context}",
            lambda b=batch, c=context: denim_decode(core, b, c, STEPS),
            batch,
            decode_floor(spec, batch, context, bandwidth),
            (lambda c=context: peer_decode(peer, c, STEPS)) if batch == 1 else None,
        )
    for length in (1024, 2048, 8192, 32768):
        measure(
            f"TTFT, prompt {length}",
            lambda n=length: denim_prefill(core, n),
            length,
            prefill_flops(spec, length) / rate,
            (lambda n=length: peer_prefill(peer, n)) if length <= 8192 else None,
        )
    requests, context, output = 256, 1024, 128
    prefill = requests * prefill_flops(spec, context) / rate
    decode = output * decode_floor(spec, requests, context + output // 2, bandwidth)
    measure(
        f"{requests} x ({context} + {output}), all at once",
        lambda: denim_throughput(core, requests, context, output),
        requests * output,
        prefill + decode,
        rounds=1,
    )
    core.check()
    writing = open_core(deferred_writes=None)
    for batch in (1, 32, 256):
        measure(
            f"decode step, batch {batch}, context 192, states written every step",
            lambda b=batch: denim_decode(writing, b, 192, STEPS),
            batch,
            decode_floor(spec, batch, 192, bandwidth),
        )
    measure(
        f"{requests} x ({context} + {output}), all at once, states written every step",
        lambda: denim_throughput(writing, requests, context, output),
        requests * output,
        prefill + decode,
        rounds=1,
    )
    writing.check()
    name = "start-up to the first token"
    columns = dict.fromkeys(rows[0], "-")
    rows.append(columns | {"measure": name, "denim ms": startup * 1e3, "vLLM ms": vllm.get(name, "-")})
    write(args.json, "cuda", rows)


if __name__ == "__main__":
    main()
