"""One kind of step, measured: whole, and its parts one by one.

Owns the order of measuring. A step's time is that of the engine in full swing; the device's share of it is
what a captured graph, or the plain forward pass, takes alone; what is left is the host's, as far as it does
not hide behind the device. A part's time is that of its layers called again with what they got, one behind
the other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from denim.commands.profile.clock import Limits, device_seconds
from denim.commands.profile.parts import HEAD, PARTS, SAMPLING, Call, recorded, work_of
from denim.engine.cache_wishes import CacheWishes
from denim.engine.core import EngineCore
from denim.errors import ConfigError
from denim.memory.fit import requests_that_fit
from denim.runner.largest import largest
from denim.runner.packing import HostStep
from denim.sampling_params import SamplingParams

STEPS = 15
WARM_UP = 4
REST, HOST = "rest of the device's time", "host, not hidden"


class Part(NamedTuple):
    """Seconds of one part and of its floor; None: it has none."""

    name: str
    seconds: float
    floor: float | None


class StepProfile(NamedTuple):
    """`title`: "decode, 32 requests of 1,024 tokens"; seconds of the whole step and its parts."""

    title: str
    seconds: float
    parts: list[Part]

    @property
    def floor(self) -> float:
        return sum(part.floor or 0.0 for part in self.parts)


def profile_decode(core: EngineCore, limits: Limits, rows: int, context: int) -> StepProfile:
    """A decode step of `rows` requests behind `context` tokens. ConfigError when they do not all fit."""
    steps = 2 * WARM_UP + STEPS + 4
    fit = min(
        core.scheduler.config.max_running,
        requests_that_fit(core.layout, core.capacity.num_slabs, context + steps),
    )
    if rows > fit:
        raise ConfigError(f"{rows} requests of {context} tokens do not fit, only {fit}; raise memory")
    _add(core, rows, context, steps)
    while any(request.computed < context for request in core.scheduler.requests.values()):
        core.step()
    for _ in range(WARM_UP):
        core.step()
    times = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        core.step()
        times.append(time.perf_counter() - begin)
    profile = _profile(core, limits, median(times), f"decode, {rows} x {context:,} tokens")
    _clear(core)
    return profile


def profile_prefill(core: EngineCore, limits: Limits, tokens: int) -> StepProfile:
    """The first step of a prompt of `tokens` tokens, or as much of it as one step takes."""
    times = []
    for _ in range(3):
        _add(core, 1, tokens, 1)
        begin = time.perf_counter()
        core.step()
        core.settle()
        times.append(time.perf_counter() - begin)
        _clear(core)
    _add(core, 1, tokens, 1)
    profile = _profile(core, limits, median(times), f"prefill, {tokens:,} tokens")
    _clear(core)
    return profile


@torch.inference_mode()
def _profile(core: EngineCore, limits: Limits, seconds: float, title: str) -> StepProfile:
    """The parts of the next step, which is run here, layer by layer, and belongs to nobody."""
    core.settle()  # so that all tokens are known
    plan = core.scheduler.schedule()
    assert plan is not None
    forward = core.runner.forward
    step = forward.arrange(plan.spans)
    model, device = forward.model, forward.device
    with recorded(model) as calls:
        batch, hidden = forward.run(step)
    last = torch.tensor([end - 1 for end in batch.cu_seqlens[1:]], device=device)
    logits = model.logits(hidden[last])
    rows = len(step.request_ids)
    decode = step.decode == rows
    captured = forward.replay(step) is not None  # then the parts are, or launches would be timed
    tokens = len(hidden)
    context = sum(batch.kv_lengths) / rows if decode else tokens / rows
    parts = []
    for name in PARTS:
        own = [call for call in calls if call.part == name]
        if name == HEAD:
            taken = device_seconds(lambda: model.logits(hidden[last]), device)
        elif name == SAMPLING:
            taken = device_seconds(lambda: largest(logits), device)
        else:
            if not own:
                continue
            taken = device_seconds(partial(_call_all, own), device, captured=captured)
        work = work_of(model.spec, own, name, tokens, rows, context)
        parts.append(Part(name, taken, limits.seconds(*work)))
    whole = device_seconds(lambda: _forward(core, step), device, captured=False)
    inside = sum(part.seconds for part in parts)
    parts.append(Part(REST, max(whole - inside, 0.0), None))
    parts.append(Part(HOST, max(seconds - max(whole, inside), 0.0), None))
    return StepProfile(title, seconds, parts)


def _call_all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _forward(core: EngineCore, step: HostStep) -> Any:
    """What the device does in a step, as the engine has it done."""
    forward = core.runner.forward
    captured = forward.replay(step)
    if captured is not None:
        return captured
    batch, hidden = forward.run(step)
    return largest(forward.last_logits(batch, hidden, range(len(step.request_ids))))


def _add(core: EngineCore, rows: int, length: int, tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    vocab = core.spec.vocab_size
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    for _ in range(rows):
        prompt = torch.randint(0, vocab, (length,), generator=generator).tolist()
        core.add(prompt, params, cache=CacheWishes(no_store=True))  # or the next profile would find it


def _clear(core: EngineCore) -> None:
    for request_id in list(core.requests):
        core.abort(request_id)
