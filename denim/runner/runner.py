"""One step on the device: a step plan goes in, sampled tokens come out.

Owns the order of a step: moves, forward pass, scores, sampling. Carries out the plan as it is; must not
decide what runs, nor know about queues, text or when a request ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from denim.layers.batch import StepBatch
from denim.memory.arena import Arena
from denim.memory.host_memory import HostMemory
from denim.memory.layout import PAGE, SLOT
from denim.memory.swap import SwapSpace
from denim.runner.flushing import flush_slots
from denim.runner.forward import Forward
from denim.runner.landing import Draw
from denim.runner.logprobs import TokenLogprobs, prompt_logprobs
from denim.runner.packing import HostStep
from denim.runner.plan import StepPlan, Swap
from denim.runner.sampler import Sampler, SamplingState

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


class Undrawn(NamedTuple):
    """`logits` [n, vocab] and, where they are known, their `largest` [n], of spans with these states."""

    states: Sequence[SamplingState]
    logits: Tensor
    largest: Tensor | None


@dataclass
class Flight:
    """A step on its way. `requests` are those that draw a token, in the order of `draw`'s rows.

    `undrawn`: what the tokens are still to be drawn from, as how that is done depends on tokens that the step
    before draws; `Runner.draw` does it when those are known.
    """

    plan: StepPlan
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    requests: Sequence[int] = ()
    draw: Draw | None = None
    undrawn: Undrawn | None = None

    def result(self) -> StepOutput:
        """Wait for the device. Raises what the device says of a step that it could not do."""
        output = StepOutput(prompt_logprobs=self.prompt_logprobs)
        if self.draw is None:
            return output
        result = self.draw.result()
        output.tokens = dict(zip(self.requests, result.tokens, strict=True))
        output.logprobs = {self.requests[row]: report for row, report in result.logprobs.items()}
        output.failed = [self.requests[row] for row in result.bad_rows]
        for request_id in output.failed:
            del output.tokens[request_id]
        return output


class Runner:
    """Starts step plans of one model over one arena, in the order in which they come. `host`: where
    checkpoints go that leave the arena; None: plans bring none out."""

    def __init__(
        self, forward: Forward, arena: Arena, swap: SwapSpace, host: HostMemory | None = None
    ) -> None:
        self.forward = forward
        self.arena = arena
        self.storage = forward.storage
        self.swap = swap
        self.host = host
        self.sampler = Sampler()
        self._rows_drawn: dict[int, int] = {}  # request id -> its row in the tokens that the last step drew

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Flight:
        """Start `plan`. On a GPU the host does not wait for it, so that it may plan and launch the next step
        meanwhile; tokens that this one draws need not be known for that (`UNKNOWN` in a span). A flight that
        is `undrawn` has to be drawn before the next launch.

        Raises CheckpointError when a span would begin from a state that stands for another number of tokens
        than the span starts at.
        """
        self._move(plan)
        flight = Flight(plan)
        if not plan.rows.request_ids and not plan.others:
            return flight
        step = self.forward.arrange(plan.others, self._rows_drawn, plan.rows)
        self.arena.expect_all(step.slot_in, step.starts)
        pending = None
        if self.storage.layout.records:
            recording = self.storage.layout.recorded(step.decode) > 0
            self._flush_read_whole(step.slot_in[step.decode :] if recording else step.slot_in)
            if recording:
                pending = self.arena.pending(step.slot_in[: step.decode])
        captured = self.forward.replay(step, pending)
        if captured is not None:
            if step.drawing:
                self._draw(step, captured.logits, flight, captured.largest)
            return flight
        batch, hidden = self.forward.run(step, pending)
        self._score_prompts(step, batch, hidden, flight)
        if step.drawing:
            self._draw(step, self.forward.last_logits(batch, hidden, step.drawing), flight)
        return flight

    def _move(self, plan: StepPlan) -> None:
        """All that changes places. Poison falls between reads of what was freed and the first write."""
        waiting = {swap.slot: swap.pending for swap in plan.swap_out if swap.pending}
        waiting |= {store.slot: store.pending for store in plan.stores if store.pending}
        if waiting:
            flush_slots(self.storage, waiting)
        for swap in plan.swap_out:
            self.swap.put(swap.request_id, [self.storage.save(name, ids) for name, ids in _entries(swap)])
        if self.host is not None:
            for transfer in plan.stores:
                self.host.store(transfer)
            if plan.moves:
                self.host.join()  # what moves may be landing just now
        for name in {move.name for move in plan.moves}:
            pairs = [(move.source, move.target) for move in plan.moves if move.name == name]
            self.storage.move(name, *zip(*pairs, strict=True))
        self.storage.poison_retired()
        for swap in plan.swap_in:
            payload = self.swap.take(swap.request_id)
            for (name, ids), saved in zip(_entries(swap), payload, strict=True):
                self.storage.load(name, ids, saved)
        if plan.page_copies:
            sources, targets = zip(*plan.page_copies, strict=True)
            self.storage.copy(PAGE, sources, targets)
        if self.host is not None:
            for transfer in plan.loads:
                self.host.load(transfer)

    def _flush_read_whole(self, slots: Sequence[int]) -> None:
        """Who does not record reads states, not records. `slots`: where such spans begin, -1: nowhere."""
        held = [slot for slot in slots if slot >= 0]
        pending = dict(zip(held, self.arena.pending(held), strict=True))
        waiting = {slot: records for slot, records in pending.items() if records}
        if waiting:
            flush_slots(self.storage, waiting)
            for slot in waiting:
                self.arena.flushed(slot)

    def _score_prompts(self, step: HostStep, batch: StepBatch, hidden: Tensor, flight: Flight) -> None:
        for row, span in enumerate(step.spans, len(step.request_ids) - len(step.spans)):
            if not span.all_logits:
                continue
            follows = [*span.tokens[1:], *([span.follows] if span.follows >= 0 else [])]
            begin = batch.cu_seqlens[row]
            reports: list[TokenLogprobs] = []
            for at in range(0, len(follows), SCORED_ROWS):
                ids = follows[at : at + SCORED_ROWS]
                logits = self.forward.model.logits(hidden[begin + at : begin + at + len(ids)])
                reports += prompt_logprobs(logits, ids, span.top_logprobs)
            flight.prompt_logprobs[span.request_id] = reports

    @torch.inference_mode()
    def draw(self, flight: Flight) -> None:
        """Draw the tokens of a flight that is undrawn. All tokens before them are known by now."""
        assert flight.undrawn is not None
        states, logits, largest = flight.undrawn
        flight.undrawn = None
        self._draw_rows(flight, states, logits, [0] * len(states), largest)

    def _draw(self, step: HostStep, logits: Tensor, flight: Flight, largest: Tensor | None = None) -> None:
        """A token for each span that draws one from its row of `logits`, now or when it can be."""
        states: Sequence[SamplingState] = step.states
        flight.requests = step.request_ids
        if len(step.drawing) < len(step.request_ids):
            states = [step.states[row] for row in step.drawing]
            flight.requests = [step.request_ids[row] for row in step.drawing]
        if True in step.unknown and any(
            [more and state.needs_past for more, state in zip(step.unknown, states, strict=True)]
        ):
            flight.undrawn = Undrawn(states, logits, largest)
        else:
            self._draw_rows(flight, states, logits, step.unknown, largest)

    def _draw_rows(
        self,
        flight: Flight,
        states: Sequence[SamplingState],
        logits: Tensor,
        ahead: Sequence[int],
        largest: Tensor | None,
    ) -> None:
        flight.draw = self.sampler.draw(logits, states, ahead, largest)
        if flight.requests != tuple(self._rows_drawn):
            self._rows_drawn = dict(zip(flight.requests, range(len(states)), strict=True))
        if flight.draw.tokens is not largest:
            self.forward.drawn[: len(states)].copy_(flight.draw.tokens)


def _entries(swap: Swap) -> list[tuple[str, Sequence[int]]]:
    """What a swap moves, by class; a model without one of the classes has nothing to move of it."""
    slots = [swap.slot] if swap.slot >= 0 else []
    both: list[tuple[str, Sequence[int]]] = [(SLOT, slots), (PAGE, swap.pages)]
    return [(name, ids) for name, ids in both if ids]
