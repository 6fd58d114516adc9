"""One step on the device: a step plan goes in, sampled tokens come out.

Owns the model and the order of a step: moves, forward pass, scores, sampling. Carries out
the plan as it is; must not decide what runs, nor know about queues, text or when a request ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from denim.layers.batch import StepBatch
from denim.memory.arena import Arena
from denim.memory.layout import PAGE, SLOT
from denim.memory.storage import Storage
from denim.memory.swap import SwapSpace
from denim.models.family import Model
from denim.runner.logprobs import TokenLogprobs, prompt_logprobs
from denim.runner.packing import is_decode, pack, sender
from denim.runner.plan import Span, StepPlan, Swap
from denim.runner.sampler import Sampler

# Rows of logits that exist at one time while a prompt is scored.
SCORED_ROWS = 256


@dataclass
class StepOutput:
    """What a step produced, by request id.

    `tokens`: the sampled token of every span that reached the end of its request's known tokens.
    `logprobs`: reports on those tokens where the request asked. `prompt_logprobs`: reports on the tokens
    that follow each position of a span, where asked. `failed`: requests whose logits were not finite;
    nothing of them may be used.
    """

    tokens: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)


class Runner:
    """Runs step plans of one model over one arena."""

    def __init__(self, model: Model, arena: Arena, storage: Storage, swap: SwapSpace):
        self.model = model
        self.arena = arena
        self.storage = storage
        self.swap = swap
        self.device = storage.buffer.device
        self.page_size = storage.layout.page_size
        self.paged = storage.layout.has(PAGE)
        self.sampler = Sampler()
        self._send = sender(self.device)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutput:
        """Carry out `plan`. Raises CheckpointError when a span would begin from a state that stands for
        another number of tokens than the span starts at."""
        self._move(plan)
        output = StepOutput()
        if not plan.spans:
            return output
        for span in plan.spans:
            if span.slot_in >= 0:
                self.arena.expect(span.slot_in, span.start)
        spans = sorted(plan.spans, key=lambda span: not is_decode(span))
        batch, tokens, _ = pack(
            spans, self.storage, page_size=self.page_size, paged=self.paged, send=self._send
        )
        hidden = self.model(tokens, batch)
        self._score_prompts(spans, batch, hidden, output)
        self._sample(spans, batch, hidden, output)
        return output

    def _move(self, plan: StepPlan) -> None:
        """Swaps and page copies. Poison falls between reads of what was freed and the first write."""
        for swap in plan.swap_out:
            self.swap.put(swap.request_id, [self.storage.save(name, ids) for name, ids in _entries(swap)])
        self.storage.poison_retired()
        for swap in plan.swap_in:
            payload = self.swap.take(swap.request_id)
            for (name, ids), saved in zip(_entries(swap), payload, strict=True):
                self.storage.load(name, ids, saved)
        if plan.page_copies:
            sources, targets = zip(*plan.page_copies, strict=True)
            self.storage.copy(PAGE, sources, targets)

    def _score_prompts(
        self, spans: Sequence[Span], batch: StepBatch, hidden: Tensor, output: StepOutput
    ) -> None:
        for row, span in enumerate(spans):
            if not span.all_logits:
                continue
            follows = [*span.tokens[1:], *([span.follows] if span.follows >= 0 else [])]
            begin = batch.cu_seqlens[row]
            reports: list[TokenLogprobs] = []
            for at in range(0, len(follows), SCORED_ROWS):
                ids = follows[at : at + SCORED_ROWS]
                logits = self.model.logits(hidden[begin + at : begin + at + len(ids)])
                reports += prompt_logprobs(logits, ids, span.top_logprobs)
            output.prompt_logprobs[span.request_id] = reports

    def _sample(self, spans: Sequence[Span], batch: StepBatch, hidden: Tensor, output: StepOutput) -> None:
        drawn = [
            (row, span.request_id, state)
            for row, span in enumerate(spans)
            if (state := span.sampling) is not None
        ]
        if not drawn:
            return
        last = [batch.cu_seqlens[row + 1] - 1 for row, _, _ in drawn]
        picked = hidden if len(last) == len(hidden) else hidden[torch.tensor(last, device=self.device)]
        result = self.sampler.sample(self.model.logits(picked), [state for _, _, state in drawn])
        bad = set(result.bad_rows)
        for place, (_, request_id, _) in enumerate(drawn):
            if place in bad:
                output.failed.append(request_id)
                continue
            output.tokens[request_id] = result.tokens[place]
            report = result.logprobs[place]
            if report is not None:
                output.logprobs[request_id] = report


def _entries(swap: Swap) -> list[tuple[str, list[int]]]:
    """What a swap moves, by class; a model without one of the classes has nothing to move of it."""
    both = [(SLOT, [swap.slot] if swap.slot >= 0 else []), (PAGE, swap.pages)]
    return [(name, ids) for name, ids in both if ids]
