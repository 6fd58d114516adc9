"""The loop: schedule, run, postprocess.

Owns the parts of one engine (model, memory, scheduler, runner) and the record of every request in flight.
`LLM` and `AsyncEngine` are two ways to drive it; it starts no threads and waits for nobody.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from denim.engine.capacity import describe, plan_capacity
from denim.engine.completion import Completion
from denim.engine.loading import LoadedModel, load
from denim.engine.options import EngineOptions, parse_bytes
from denim.engine.outputs import RequestMetrics, RequestOutput, StreamDelta, logprobs_by_token
from denim.engine.tokenizer import need_tokenizer
from denim.errors import RequestError
from denim.ledger.preemption import RATES, recompute_seconds, swap_seconds
from denim.memory.arena import Arena
from denim.memory.layout import ArenaLayout
from denim.memory.storage import Storage
from denim.memory.swap import SwapSpace
from denim.runner.logprobs import TokenLogprobs
from denim.runner.plan import StepPlan
from denim.runner.runner import Runner
from denim.runner.sampler import SamplingState
from denim.sampling_params import SamplingParams
from denim.scheduler.config import SchedulerConfig
from denim.scheduler.request import Family, Request
from denim.scheduler.scheduler import Scheduler

log = logging.getLogger("denim")

Prompt = str | Sequence[int]

_NONE = {"total": 0, "used": 0, "cached": 0, "free": 0}


@dataclass
class InFlight:
    """One request: its output so far, and its completions by the scheduler's id."""

    output: RequestOutput
    metrics: RequestMetrics
    completions: dict[int, Completion] = field(default_factory=dict)


class EngineCore:
    """Requests in, tokens out, one step at a time."""

    def __init__(self, options: EngineOptions, loaded: LoadedModel | None = None) -> None:
        """`loaded` takes the place of what `options.model` names. Raises ConfigError or CapacityError."""
        self.options = options
        self.loaded = loaded or load(options)
        self.spec = spec = self.loaded.spec
        self.tokenizer = self.loaded.tokenizer
        self.defaults = self.loaded.defaults
        device = self.loaded.device
        kv_dtype = None if options.kv_dtype == "auto" else options.kv_dtype
        self.layout = ArenaLayout.of(spec, options.page_size, kv_dtype)
        self.capacity = capacity = plan_capacity(options, spec, self.layout, device)
        storage = Storage(self.layout, capacity.num_slabs, device, debug_poison=options.debug)
        self.arena = Arena(self.layout, capacity.num_slabs, storage.retire if options.debug else None)
        self.swap = SwapSpace(parse_bytes("swap_space", options.swap_space))
        config = SchedulerConfig(
            chunk_size=options.chunk_size,
            max_num_seqs=capacity.max_num_seqs,
            max_num_batched_tokens=capacity.max_num_batched_tokens,
            max_model_len=capacity.max_model_len,
        )
        self.scheduler = Scheduler(config, self.arena, self.swap, self._recompute_cheaper)
        self.runner = Runner(self.loaded.model, self.arena, storage, self.swap)
        self.requests: dict[str, InFlight] = {}
        self.steps = 0
        self.tokens = 0
        self._ids = count()  # of completions; the scheduler's ids
        self._accepted = 0  # requests so far
        self._request_of: dict[int, str] = {}
        log.info("%s on %s: %s", self.loaded.name, device, describe(spec, self.layout, capacity))

    # Requests

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> str:
        """Queue a request; returns its id. Raises RequestError, with nothing kept, when it cannot run."""
        params = params or SamplingParams()
        text, tokens = self._tokens_of(prompt)
        if request_id is None:
            request_id = f"request-{self._accepted}"
        if request_id in self.requests:
            raise RequestError(f"request_id {request_id!r} is in use by a request that has not finished")
        params = params.resolve(self.defaults, seed=self.options.seed + self._accepted)
        params.check_vocab(self.spec.vocab_size)
        metrics = RequestMetrics(time.monotonic())
        in_flight = InFlight(RequestOutput(request_id, text, tokens, [], metrics=metrics), metrics)
        family = Family() if params.n > 1 else None
        try:
            for index in range(params.n):
                self._add_completion(in_flight, index, params, priority, family)
        except BaseException:
            for id_ in in_flight.completions:
                self.scheduler.abort(id_)
            raise
        if params.prompt_logprobs is not None:
            in_flight.output.prompt_logprobs = [None]
        self.requests[request_id] = in_flight
        self._request_of |= dict.fromkeys(in_flight.completions, request_id)
        self._accepted += 1
        return request_id

    def abort(self, request_id: str) -> list[StreamDelta]:
        """End a request at once, whatever it is doing; its memory is free. Unknown ids are no error.

        Returns the closing deltas of its unfinished completions.
        """
        in_flight = self.requests.get(request_id)
        if in_flight is None:
            return []
        running = [id_ for id_, c in in_flight.completions.items() if not c.output.finished]
        return [self._end(id_, "abort") for id_ in running]

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    # One step

    def step(self) -> list[StreamDelta]:
        """Run one step; returns what every request got from it. [] when there is nothing to do.

        A request is out of `requests` once its last delta was returned. A failing step ends the requests
        that took part in it, with finish_reason "error", and the engine goes on.
        """
        plan = self.scheduler.schedule()
        if plan is None:
            return []
        now = time.monotonic()
        for span in plan.spans:
            metrics = self.requests[self._request_of[span.request_id]].metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = now
        try:
            result = self.runner.run(plan)
        except BaseException as error:
            deltas = self._fail(plan)
            if not isinstance(error, Exception):
                raise
            log.exception("a step failed; its %d request(s) end with an error", len(deltas))
            return deltas
        deltas = []
        for id_ in result.failed:
            log.error("request %s: logits are not finite; it ends with an error", self._request_of[id_])
            deltas.append(self._end(id_, "error"))
        for id_, reports in result.prompt_logprobs.items():
            self._note_prompt_logprobs(id_, reports)
        self.scheduler.update(plan, result.tokens)
        self.steps += 1
        self.tokens += sum(span.length for span in plan.spans)

        now = time.monotonic()
        for id_, token in result.tokens.items():
            request_id = self._request_of[id_]
            in_flight = self.requests[request_id]
            if in_flight.metrics.first_token_time is None:
                in_flight.metrics.first_token_time = now
            try:
                delta = in_flight.completions[id_].accept(token, result.logprobs.get(id_))
            except Exception:
                log.exception("request %s: its text cannot be made; it ends with an error", request_id)
                deltas.append(self._end(id_, "error"))
                continue
            deltas.append(delta)
            if delta.finish_reason is not None:
                self.scheduler.finish(id_, delta.finish_reason)
                self._close(id_)
        if self.options.debug:
            self.check()
        return deltas

    # What an operator sees

    def stats(self) -> dict[str, Any]:
        """Keys: slabs, pages, slots, each {total, used, cached, free}; running, waiting, swapped;
        preempted_swap, preempted_recompute; prefix; steps; tokens (applied, over all steps)."""
        prefix = {"queries": 0, "hit_tokens": 0, "query_tokens": 0, "lost": {}}
        counted = {"prefix": prefix, "steps": self.steps, "tokens": self.tokens}
        absent = {"pages": _NONE, "slots": _NONE}  # a model without attention has no pages, say
        return absent | self.arena.stats() | self.scheduler.stats() | counted

    def check(self) -> None:
        """Raises AssertionError when an invariant of memory or scheduler is broken."""
        self.scheduler.check()

    # Parts

    def _add_completion(
        self, in_flight: InFlight, index: int, params: SamplingParams, priority: int, family: Family | None
    ) -> None:
        """Queue completion `index`; the first one also reports the prompt's log-probabilities."""
        output, ends = in_flight.output, self.defaults.end_token_ids
        prompt = output.prompt_token_ids
        room = self.scheduler.config.max_model_len - len(prompt)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        sampling = SamplingState(params, prompt, self.spec.vocab_size, ends, index)
        completion = Completion(output.request_id, index, params, sampling, max_tokens, ends, self.tokenizer)
        scored = params.prompt_logprobs if index == 0 else None
        id_ = next(self._ids)
        self.scheduler.add(Request(id_, prompt, max_tokens, sampling, priority, scored, family))
        in_flight.completions[id_] = completion
        output.outputs.append(completion.output)

    def _tokens_of(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """(text, token ids) of a prompt, checked against vocabulary and context."""
        if isinstance(prompt, str):
            text, tokens = prompt, need_tokenizer(self.tokenizer, "A text prompt").encode(prompt)
        else:
            text, tokens = None, _checked_ids(prompt, self.spec.vocab_size)
        longest = self.scheduler.config.max_model_len
        if not tokens:
            raise RequestError("the prompt is empty; give at least one token")
        if len(tokens) >= longest:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens; with one token of output max_model_len={longest}"
                f" allows {longest - 1}; shorten it or raise max_model_len"
            )
        return text, tokens

    def _recompute_cheaper(self, tokens: int) -> bool:
        rates = RATES[self.loaded.device.type]
        return recompute_seconds(self.spec, tokens, rates) < swap_seconds(
            self.layout.request_bytes(tokens), rates
        )

    def _note_prompt_logprobs(self, id_: int, reports: list[TokenLogprobs]) -> None:
        output = self.requests[self._request_of[id_]].output
        assert output.prompt_logprobs is not None
        decode = None if self.tokenizer is None else self.tokenizer.decode_one
        output.prompt_logprobs += [logprobs_by_token(report, decode) for report in reports]

    def _fail(self, plan: StepPlan) -> list[StreamDelta]:
        """End every request of a step that did not complete; their memory holds nothing of use."""
        ids = [part.request_id for group in (plan.spans, plan.swap_out, plan.swap_in) for part in group]
        deltas = [self._end(id_, "error") for id_ in dict.fromkeys(ids) if id_ in self._request_of]
        self.scheduler.update(plan, {})
        return deltas

    def _end(self, id_: int, reason: str) -> StreamDelta:
        completion = self.requests[self._request_of[id_]].completions[id_]
        delta = completion.end(reason)
        self.scheduler.finish(id_, reason)
        self._close(id_)
        return delta

    def _close(self, id_: int) -> None:
        """Forget a finished completion, and with the last one its request."""
        request_id = self._request_of.pop(id_)
        in_flight = self.requests[request_id]
        if all(completion.output.finished for completion in in_flight.completions.values()):
            in_flight.output.finished = True
            in_flight.metrics.finished_time = time.monotonic()
            del self.requests[request_id]


def _checked_ids(prompt: Sequence[int], vocab_size: int) -> list[int]:
    try:
        tokens = [int(token) for token in prompt]
        exact = all(a == b and not isinstance(b, bool) for a, b in zip(tokens, prompt, strict=True))
    except (TypeError, ValueError):
        exact = False
    if not exact:
        raise RequestError(f"a prompt is a string or a list of token ids, not {_short(prompt)}")
    for place, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"token id {token} at position {place} is outside the vocabulary of {vocab_size} tokens"
            )
    return tokens


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
