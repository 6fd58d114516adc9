"""Perplexity of a model whose states or KV are kept in few bits, by the length of what it has read.

Owns the scoring, step by step on the engine's forward pass, and the means over stretches of positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from denim.commands.study.drift import CHECKPOINT_SHARE
from denim.commands.study.storage import STORAGES, Storage
from denim.engine import LLM
from denim.errors import CapacityError
from denim.memory.layout import PAGE, SLOT
from denim.runner.plan import Span

EXACT, ROUNDED_KV = "all fp32", "KV bf16"

MEMORY = "1GiB"  # of an engine's arena; 4,095 tokens of denim-tiny in fp32 are 4.5 MiB
FIRST_STRETCH = 64
FRESH = -1  # the slot of no state
DRAWS = True  # a span with any sampling state has its logits computed


def perplexity(texts: list[list[int]], device: str) -> dict[str, Any]:
    """{edges, checkpoint, runs: {name: {perplexity, difference: one a stretch, whole_perplexity,
    whole_difference}}}.

    A run keeps KV in bf16, or states in one of `STORAGES`; the weights and what is not named are fp32, so
    that each is seen alone. Stretch i holds the positions edges[i] .. edges[i + 1] - 1 of every text; a
    difference is the mean |Δ log-probability| against the run with everything in fp32, in nats.
    """
    length = len(texts[0])
    edges = stretches(length)
    by_storage = score(texts, device, STORAGES)
    logprobs = {name_of(storage): one for storage, one in zip(STORAGES, by_storage, strict=True)}
    logprobs[ROUNDED_KV] = score(texts, device, STORAGES[:1], kv_dtype="bfloat16")[0]
    # logprobs[:, i] belongs to position i + 1: nothing predicts position 0.
    cut = [(max(0, a - 1), b - 1) for a, b in pairwise(edges)]
    runs = {}
    for name in (EXACT, ROUNDED_KV, *(name_of(storage) for storage in STORAGES[1:])):
        one = logprobs[name]
        away = (one - logprobs[EXACT]).abs()
        runs[name] = {
            "perplexity": [math.exp(-one[:, a:b].mean().item()) for a, b in cut],
            "difference": [away[:, a:b].mean().item() for a, b in cut],
            "whole_perplexity": math.exp(-one.mean().item()),
            "whole_difference": away.mean().item(),
        }
    return {
        "length": length,
        "texts": len(texts),
        "edges": edges,
        "checkpoint": checkpoint_of(length),
        "runs": runs,
    }


def name_of(storage: Storage) -> str:
    """The run whose states are kept so; the first storage is fp32."""
    return EXACT if storage is STORAGES[0] else f"state {storage.name}"


def stretches(length: int) -> list[int]:
    """0, 64, 128, 256, … up to `length`; the last stretch may be short of a doubling."""
    edges = [0]
    edge = FIRST_STRETCH
    while edge < length:
        edges.append(edge)
        edge *= 2
    return [*edges, length]


def checkpoint_of(length: int) -> int:
    """Behind so many tokens a state is quantised that is quantised once."""
    return max(1, length // CHECKPOINT_SHARE)


@torch.inference_mode()
def score(
    texts: list[list[int]], device: str, storages: Sequence[Storage], kv_dtype: str = "float32"
) -> Tensor:
    """Log-probabilities of the tokens behind the first one, [storages, texts, length - 1] float64 on the CPU.

    Every text is read once for each storage, all side by side, a decode row each, over memory of an engine
    that has nothing else to do. Behind every token, as decode would, or once at `checkpoint_of` the length, a
    state becomes what its storage makes of it. Raises CapacityError when the texts do not fit.
    """
    length, rows = len(texts[0]), len(storages) * len(texts)
    llm = LLM(
        device=device,
        memory=MEMORY,
        max_num_seqs=rows,
        max_num_batched_tokens=rows,
        max_model_len=length + 1,
        checkpoint_policy="none",
        dtype="float32",
        state_dtype="float32",
        kv_dtype=kv_dtype,
    )
    forward = llm.core.runner.forward
    pages = -(-length // forward.page_size)
    slots = llm.core.arena.alloc_many(SLOT, rows)
    table = llm.core.arena.alloc_many(PAGE, rows * pages)
    if slots is None or table is None:
        raise CapacityError(
            f"{len(texts)} texts of {length:,} tokens do not fit into {MEMORY}; lower --windows or --length"
        )
    tables = [table[row * pages : (row + 1) * pages] for row in range(rows)]
    states = [forward.storage.state(layer, "recurrent") for layer in llm.core.spec.linear_layers]
    places = torch.tensor(slots, device=forward.device).split(len(texts))
    generator = torch.Generator(forward.device).manual_seed(0)
    tokens = torch.tensor(texts * len(storages), device=forward.device).T
    scored = torch.empty(length - 1, rows, device=forward.device)
    for t in range(length - 1):
        spans = [
            Span(row, t, [text[t]], tables[row], slots[row] if t else FRESH, slots[row], sampling=DRAWS)
            for row, text in enumerate(texts * len(storages))
        ]
        step = forward.arrange(spans)
        captured = forward.replay(step)
        if captured is None:
            batch, hidden = forward.run(step)
            logits = forward.last_logits(batch, hidden, range(rows))
        else:
            logits = captured.logits
        scored[t] = logits.log_softmax(-1).gather(1, tokens[t + 1].unsqueeze(1)).squeeze(1)
        for storage, here in zip(storages, places, strict=True):
            if not storage.once or t + 1 == checkpoint_of(length):
                for state in states:
                    state.index_copy_(0, here, storage.kept(state.index_select(0, here), generator))
    return scored.T.double().cpu().unflatten(0, (len(storages), len(texts)))
