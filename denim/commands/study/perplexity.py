"""Perplexity of a model with states or KV kept in bf16, by the length of what it has read.

Owns the scoring through the engine's `prompt_logprobs` and the means over stretches of positions.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch

from denim.engine import LLM
from denim.sampling_params import SamplingParams

KEPT = {"all fp32": {}, "KV bf16": {"kv_dtype": "bfloat16"}, "state bf16": {"state_dtype": "bfloat16"}}
"""Engine options of each run; the weights and what is not named are fp32, so that each is seen alone."""

FIRST_STRETCH = 64


def perplexity(texts: list[list[int]], device: str) -> dict[str, Any]:
    """{edges, runs: {name: {perplexity: one a stretch, difference: mean |Δ log-probability| against fp32}}}.

    Texts go through the engine one token a step, so that a state is rounded behind every token, as in decode.
    Stretch i holds the positions edges[i] .. edges[i + 1] - 1 of every text; differences are in nats.
    """
    length = len(texts[0])
    edges = stretches(length)
    exact: torch.Tensor | None = None
    runs = {}
    for name, options in KEPT.items():
        logprobs = torch.tensor(score(texts, device, options), dtype=torch.float64)
        exact = logprobs if exact is None else exact
        away = (logprobs - exact).abs()
        # logprobs[:, i] belongs to position i + 1: nothing predicts position 0.
        cut = [(max(0, a - 1), b - 1) for a, b in pairwise(edges)]
        runs[name] = {
            "perplexity": [math.exp(-logprobs[:, a:b].mean().item()) for a, b in cut],
            "difference": [away[:, a:b].mean().item() for a, b in cut],
            "whole_perplexity": math.exp(-logprobs.mean().item()),
            "whole_difference": away.mean().item(),
        }
    return {"length": length, "texts": len(texts), "edges": edges, "runs": runs}


def stretches(length: int) -> list[int]:
    """0, 64, 128, 256, … up to `length`; the last stretch may be short of a doubling."""
    edges = [0]
    edge = FIRST_STRETCH
    while edge < length:
        edges.append(edge)
        edge *= 2
    return [*edges, length]


def score(texts: list[list[int]], device: str, options: dict[str, str]) -> list[list[float]]:
    """Log-probabilities of the tokens behind the first one, by text."""
    fp32 = {"dtype": "float32", "kv_dtype": "float32", "state_dtype": "float32"}
    llm = LLM(
        device=device,
        max_num_seqs=1,
        max_num_batched_tokens=1,
        max_model_len=len(texts[0]) + 1,
        checkpoint_policy="none",
        **(fp32 | options),
    )
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    scored = []
    for text in texts:
        reports = llm.generate(text, params)[0].prompt_logprobs
        assert reports is not None
        scored.append(
            [report[token].logprob for token, report in zip(text[1:], reports[1:], strict=True) if report]
        )
    return scored
