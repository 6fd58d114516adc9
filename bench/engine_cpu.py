"""Denim beside transformers on the CPU: the same random bf16 weights, one process, alternating rounds.

    python -m bench.engine_cpu [--model qwen3.5-0.8b] [--json FILE]

Each figure is the median over rounds. Run it on an idle machine.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from bench.engine_steps import denim_decode, denim_prefill, peer_decode, peer_prefill
from bench.random_model import engine, peer_model
from bench.report import parser_of, write

CONTEXT = 256  # tokens before the decoded ones
STEPS = 12  # decode steps a round
ROUNDS = 3
BATCH = 8

Timed = Callable[[], float]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="qwen3.5-0.8b")
    args = parser.parse_args()

    torch.manual_seed(0)
    peer = peer_model(args.model, "bfloat16", "cpu")
    core = engine(args.model, "bfloat16", "cpu", peer.state_dict(), memory="1GiB", max_model_len=4096)

    def decode_peer() -> float:
        return peer_decode(peer, CONTEXT, STEPS)

    def measure(name: str, run_peer: Timed, run_denim: Timed, peer_tokens: int, denim_tokens: int) -> None:
        """Add a row; the two numbers of tokens are what each makes in the seconds that it returns."""
        run_peer(), run_denim()  # first calls allocate and choose kernels
        theirs, ours = zip(*[(run_peer(), run_denim()) for _ in range(ROUNDS)], strict=True)
        row = {
            "measure": name,
            "transformers ms": median(theirs) * 1e3,
            "denim ms": median(ours) * 1e3,
            "transformers tok/s": peer_tokens / median(theirs),
            "denim tok/s": denim_tokens / median(ours),
        }
        rows.append(row | {"ratio of tok/s": row["denim tok/s"] / row["transformers tok/s"]})

    rows: list[dict[str, Any]] = []
    measure("decode, batch 1", decode_peer, lambda: denim_decode(core, 1, CONTEXT, STEPS), 1, 1)
    for length in (512, 2048):
        measure(
            f"prefill {length}",
            lambda n=length: peer_prefill(peer, n),
            lambda n=length: denim_prefill(core, n),
            length,
            length,
        )
    measure(
        f"decode, batch {BATCH} (peer 1)",
        decode_peer,
        lambda: denim_decode(core, BATCH, CONTEXT, STEPS),
        1,
        BATCH,
    )
    write(args.json, "cpu", rows)


if __name__ == "__main__":
    main()
