"""The forms of the chunked gated delta rule that the chunk-size study measures on a device.

Owns their inputs: the same random values for each. Plain torch in fp32 runs everywhere and takes any chunk;
on a CUDA device with Triton its kernels run too, in bf16, with chunks up to those that they are made for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from denim.commands.study.drift import RuleInputs
from denim.recurrence.backend import TRITON, rule_backend
from denim.recurrence.chunk_table import NO_SLOT, ChunkTable
from denim.recurrence.gated_delta import gated_delta_chunked, l2norm

Runs = dict[int, Callable[[], object]]


def forms_on(
    device: torch.device, heads: int, dim: int, tokens: int, chunks: Sequence[int]
) -> dict[str, Runs]:
    """Form by name, and for each chunk size that it takes what runs it once, from an empty state."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(tokens, heads, dim, generator=generator) for _ in range(3))
    log_decay = -torch.rand(tokens, heads, generator=generator) * 0.1  # alpha from 0.9 to 1
    beta = torch.rand(tokens, heads, generator=generator)
    inputs = RuleInputs(*(x.to(device) for x in (l2norm(q), l2norm(k), v, log_decay, beta)))
    forms = {"torch, float32": _plain(inputs, chunks)}
    if rule_backend(device.type) == TRITON:
        forms["triton, bfloat16"] = _kernels(inputs, chunks)
    return forms


def _plain(inputs: RuleInputs, chunks: Sequence[int]) -> Runs:
    whole = [0, len(inputs.q)]
    return {
        chunk: partial(gated_delta_chunked, *inputs, cu_seqlens=whole, chunk_size=chunk) for chunk in chunks
    }


def _kernels(inputs: RuleInputs, chunks: Sequence[int]) -> Runs:
    from denim.recurrence.kernels.delta_pass import largest_chunk, plan_of
    from denim.recurrence.kernels.gated_delta_chunks import gated_delta_chunks

    tokens, heads, dim = inputs.v.shape
    dtype, device = torch.bfloat16, inputs.v.device
    rows = torch.cat((inputs.q, inputs.k, inputs.v), 1).flatten(1).to(dtype)
    # What the gates make log_decay and beta of: the kernels have them inside.
    b = torch.logit(inputs.beta).to(dtype)
    a = torch.expm1(-inputs.log_decay).log().to(dtype)
    zeros = torch.zeros(heads, device=device)
    state = torch.zeros(1, heads, dim, dim, device=device)
    runs: Runs = {}
    for chunk in chunks:
        if chunk <= largest_chunk(dtype):
            table = ChunkTable.of([0, tokens], [NO_SLOT], [0], chunk, device)
            plan = plan_of(table, state, dtype)  # the same kernels for every chunk, on Hopper too
            inputs_of_chunk = (rows, b, a, zeros, zeros, table, state, heads)
            runs[chunk] = partial(gated_delta_chunks, *inputs_of_chunk, plan=plan)
    return runs
