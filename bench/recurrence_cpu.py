"""The gated delta rule and the short convolution beside transformers' torch functions, on the CPU.

    python -m bench.recurrence_cpu [--key-heads 16 --value-heads 16 --dim 128] [--json FILE]

The same fp32 inputs in one process; the functions take turns, and each figure is the least of all rounds,
so that other work on the machine disturbs the ratio little. `difference` is the largest one between the
two outputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen3_5 import modeling_qwen3_5 as peer

from bench.report import parser_of, write
from denim.recurrence.gated_delta import gated_delta_chunked, gated_delta_step, l2norm
from denim.recurrence.short_conv import short_conv, short_conv_step

PREFILL = (512, 2048)  # tokens
CHUNKS = (32, 64)
BATCHES = (1, 8)
WIDTH = 4  # of the convolution
PREFILL_ROUNDS = 9
STEP_ROUNDS = 200


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--key-heads", type=int, default=16)
    parser.add_argument("--value-heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=128)
    args = parser.parse_args()

    torch.manual_seed(0)
    heads = (args.key_heads, args.value_heads, args.dim)
    channels = (2 * args.key_heads + args.value_heads) * args.dim
    rows = []
    with torch.no_grad():
        for tokens in PREFILL:
            rows += [rule_by_chunks(tokens, chunk, *heads) for chunk in CHUNKS]
        rows += [rule_by_step(batch, *heads) for batch in BATCHES]
        rows += [convolution(tokens, channels) for tokens in PREFILL]
        rows += [convolution_step(batch, channels) for batch in BATCHES]
    write(args.json, "cpu", rows)


def inputs(tokens: int, key_heads: int, value_heads: int, dim: int) -> list[Tensor]:
    """q, k, v, log_decay, beta of `tokens` tokens."""
    q, k = l2norm(torch.randn(2, tokens, key_heads, dim))
    gates = torch.rand(2, tokens, value_heads)
    return [q, k, torch.randn(tokens, value_heads, dim), -gates[0], gates[1]]


def rule_by_chunks(tokens: int, chunk: int, *heads: int) -> dict[str, Any]:
    x = inputs(tokens, *heads)
    batch = [t.unsqueeze(0) for t in x]
    return compare(
        f"rule, {tokens} tokens, chunk {chunk} (peer 64)",
        lambda: peer.torch_chunk_gated_delta_rule(*batch, output_final_state=True)[0].squeeze(0),
        lambda: gated_delta_chunked(*x, cu_seqlens=[0, tokens], chunk_size=chunk)[0],
        PREFILL_ROUNDS,
    )


def rule_by_step(batch: int, *heads: int) -> dict[str, Any]:
    """The states stay where they are and go on from round to round; both sides see the same rounds."""
    x = inputs(batch, *heads)
    one_token = [t.unsqueeze(1) for t in x]
    ours = list(torch.randn(batch, *heads[1:], heads[2]))
    theirs = torch.stack(ours).mT.contiguous()

    def run_peer() -> Tensor:
        out, final = peer.torch_recurrent_gated_delta_rule(
            *one_token, initial_state=theirs, output_final_state=True
        )
        theirs.copy_(final)  # as its cache does
        return out.squeeze(1)

    return compare(
        f"rule, one token, batch {batch}", run_peer, lambda: gated_delta_step(*x, ours), STEP_ROUNDS
    )


def convolution(tokens: int, channels: int) -> dict[str, Any]:
    """With SiLU, as the model has it; bf16, as the model runs it. Each in the layout of its own model."""
    x, weight = torch.randn(tokens, channels).bfloat16(), torch.randn(channels, WIDTH).bfloat16()
    return compare(
        f"convolution, {tokens} tokens, bf16",
        lambda: (
            peer.causal_conv1d_fn(x.unsqueeze(0).transpose(1, 2), weight, activation="silu")
            .transpose(1, 2)
            .squeeze(0)
        ),
        lambda: F.silu(short_conv(x, weight, cu_seqlens=[0, tokens])[0]),
        PREFILL_ROUNDS,
    )


def convolution_step(batch: int, channels: int) -> dict[str, Any]:
    x, weight = torch.randn(batch, channels).bfloat16(), torch.randn(channels, WIDTH).bfloat16()
    window = torch.randn(batch, WIDTH - 1, channels).bfloat16()
    theirs = F.pad(window.mT, (1, 0)).contiguous()  # it keeps `WIDTH` columns
    return compare(
        f"convolution, one token, batch {batch}, bf16",
        lambda: peer.causal_conv1d_update(x.unsqueeze(2), theirs, weight, activation="silu").squeeze(2),
        lambda: F.silu(short_conv_step(x, weight, window)),
        STEP_ROUNDS,
    )


def compare(
    name: str, run_peer: Callable[[], Tensor], run_denim: Callable[[], Tensor], rounds: int
) -> dict[str, Any]:
    difference = (run_peer() - run_denim()).abs().max().item()
    theirs, ours = zip(*[(_seconds(run_peer), _seconds(run_denim)) for _ in range(rounds)], strict=True)
    return {
        "measure": name,
        "transformers ms": min(theirs) * 1e3,
        "denim ms": min(ours) * 1e3,
        "times as fast": min(theirs) / min(ours),
        "difference": difference,
    }


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
