"""What both engine benches time: prefills and decode steps of an `EngineCore`, and of transformers.

Denim's times are whole engine steps (schedule, forward, sample, postprocess; a step ends when the sampled
ids are on the host), the peer's a forward and an argmax.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from denim.engine.core import EngineCore
from denim.sampling_params import SamplingParams


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1000, 100_000, (length,), generator=generator).tolist()


def denim_prefill(core: EngineCore, length: int) -> float:
    """Seconds from a prompt to its first token."""
    core.add(prompt_of(length), SamplingParams(temperature=0, max_tokens=1))
    begin = time.perf_counter()
    while core.has_work:
        core.step()
    return time.perf_counter() - begin


def denim_decode(core: EngineCore, batch: int, context: int, steps: int) -> float:
    """Median seconds of a decode step of `batch` requests, over `steps` steps behind `context` tokens."""
    params = SamplingParams(temperature=0, max_tokens=steps + 2, ignore_eos=True)
    for i in range(batch):
        core.add(prompt_of(context, seed=i), params)
    while any(request.computed < context for request in core.scheduler.requests.values()):
        core.step()
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        core.step()
        times.append(time.perf_counter() - begin)
    for request_id in list(core.requests):
        core.abort(request_id)
    return median(times)


def denim_throughput(core: EngineCore, requests: int, context: int, output: int) -> float:
    """Seconds for `requests` requests of `context` + `output` tokens that arrive together."""
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    begin = time.perf_counter()
    for i in range(requests):
        core.add(prompt_of(context, seed=i), params)
    while core.has_work:
        core.step()
    return time.perf_counter() - begin


@torch.inference_mode()
def peer_prefill(model: Any, length: int) -> float:
    """Seconds from a prompt to its first token."""
    from transformers import DynamicCache

    ids = torch.tensor([prompt_of(length)], device=model.device)
    begin = time.perf_counter()
    model(ids, past_key_values=DynamicCache(config=model.config), logits_to_keep=1).logits[
        0, -1
    ].argmax().item()
    return time.perf_counter() - begin


@torch.inference_mode()
def peer_decode(model: Any, context: int, steps: int) -> float:
    """Median seconds of a decode step at batch 1."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    prompt = torch.tensor([prompt_of(context)], device=model.device)
    token = model(prompt, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
        token.item()
        times.append(time.perf_counter() - begin)
    return median(times)
