"""The loop: schedule, run, postprocess.

Owns the order of a step over an engine's parts, and the record of every request in flight. `LLM` and
`AsyncEngine` are two ways to drive it: it runs in its caller's thread, and waits for a step's outcome alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from numbers import Integral
from typing import Any

from denim.cache.node import Tokens
from denim.cache.prefix_cache import Namespace
from denim.cache.snapshot import snapshot
from denim.engine.cache_wishes import NO_WISHES, CacheWishes
from denim.engine.completion import Completion
from denim.engine.grammars import Grammars
from denim.engine.in_flight import InFlight
from denim.engine.live_view import request_view, slab_view
from denim.engine.loading import LoadedModel, load
from denim.engine.options import EngineOptions
from denim.engine.outputs import StreamDelta
from denim.engine.parts import Parts
from denim.engine.prompts import Prompt, PromptReader, ReadPrompt
from denim.errors import DenimError, RequestError
from denim.runner.plan import StepPlan
from denim.runner.random import derive_seed
from denim.runner.runner import Flight, StepOutput
from denim.runner.sampler import SamplingState, ending_ids
from denim.sampling_params import SamplingParams, checked_params
from denim.scheduler.request import Family, Request
from denim.scheduler.reuse import Reuse

log = logging.getLogger("denim")

UNTIL_IT_COMES = 2e-4
"""Seconds between two looks when there is nothing to do but to wait for what comes up from a lower tier."""

_NONE = {"total": 0, "used": 0, "cached": 0, "free": 0}


class EngineCore:
    """Requests in, tokens out, one step at a time."""

    def __init__(self, options: EngineOptions, loaded: LoadedModel | None = None) -> None:
        """`loaded` takes the place of what `options.model` names. Raises ConfigError or CapacityError."""
        self.options = options
        self.loaded = loaded or load(options)
        self.spec = self.loaded.spec
        self.tokenizer = self.loaded.tokenizer
        self.defaults = self.loaded.defaults
        self.parts = Parts(options, self.loaded)
        self.layout, self.capacity = self.parts.layout, self.parts.capacity
        self.facts = self.parts.facts()
        self.reader = PromptReader(self.tokenizer, self.facts)
        self.grammars = Grammars(self.tokenizer, self.spec.vocab_size, self.defaults.end_token_ids)
        self.steps = 0
        self.tokens = 0
        self._ids = count()  # of completions; the scheduler's ids
        self._names = count()  # of requests that come without an id
        self._accepted = 0  # requests so far
        self._let_go: list[str] = []  # requests to abort before the next step
        # Whether a step is planned and started before the outcome of the last one is known.
        wish = options.async_scheduling
        self._overlap = self.loaded.device.type == "cuda" if wish is None else wish
        self._open_books()
        self.parts.log_start()

    def _open_books(self) -> None:
        """Bookkeeping of memory and requests, empty."""
        self.arena, self.swap, self.scheduler, self.runner = self.parts.open_books()
        self.requests: dict[str, InFlight] = {}
        self._flight: Flight | None = None  # a step whose outcome has not been taken
        self._request_of: dict[int, InFlight] = {}  # by completion

    @contextmanager
    def _books(self, clean: type[BaseException] | tuple[()] = ()) -> Iterator[None]:
        """What happens inside is done whole, or all requests end with an error and the books start afresh.

        An interrupt may fall between any two lines of Python; half a change of the books would stop the
        engine for good. Errors of kind `clean` leave nothing half-done.
        """
        try:
            yield
        except clean:
            raise
        except BaseException:
            lost = list(self.requests.values())
            self._open_books()
            for in_flight in lost:
                for id_ in in_flight.unfinished():
                    in_flight.completions[id_].end("error")
                in_flight.close()
            log.error("interrupted at an unsafe place: %d request(s) end with an error", len(lost))
            raise

    # Requests

    def add(
        self,
        prompt: Prompt | ReadPrompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache: CacheWishes = NO_WISHES,
    ) -> str:
        """Queue a request; returns its id. Raises RequestError, with nothing kept, when it cannot run.

        A structured output that was not compiled before (`grammars`) is compiled now, and waited for.
        """
        reader = self.reader
        read = reader.fitting(prompt) if isinstance(prompt, ReadPrompt) else reader.read(prompt)
        params = checked_params(params)
        if isinstance(priority, bool) or not isinstance(priority, Integral):
            raise RequestError(f"priority={priority!r} must be a whole number; lower goes first")
        if request_id is None:
            request_id = next(name for n in self._names if (name := f"request-{n}") not in self.requests)
        elif not isinstance(request_id, str):
            raise RequestError(f"request_id={request_id!r} must be a string")
        elif request_id in self.requests:
            raise RequestError(f"request_id {request_id!r} is in use by a request that has not finished")
        # A positive seed for whoever gave none; -1 would mean none again.
        params = params.resolve(self.defaults, seed=derive_seed(self.options.seed, self._accepted) >> 1)
        params.check_vocab(self.spec.vocab_size)
        cache.check_prompt(len(read.ids))
        in_flight = InFlight.of(request_id, read, params)
        family = Family() if params.n > 1 else None
        with self._books(clean=DenimError):
            try:
                for index in range(params.n):
                    reuse = self._reuse(read, cache)
                    self._add_completion(in_flight, read.ids, index, params, int(priority), family, reuse)
            except DenimError:
                for id_ in in_flight.completions:
                    self.scheduler.finish(id_, "abort")
                raise
            self.requests[request_id] = in_flight
            self._request_of |= dict.fromkeys(in_flight.completions, in_flight)
            self._accepted += 1
        return request_id

    def abort(self, request_id: str) -> list[StreamDelta]:
        """End a request at once, whatever it is doing; its memory is free. Unknown ids are no error.

        Returns the closing deltas of its unfinished completions.
        """
        in_flight = self.requests.get(request_id)
        if in_flight is None:
            return []
        with self._books():
            return [self._end(id_, "abort") for id_ in in_flight.unfinished()]

    def let_go(self, request_id: str) -> None:
        """Abort before the next step or report. For finalisers, which may run in the middle of anything."""
        self._let_go.append(request_id)

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes. Requests that run keep what they began from, and leave nothing behind."""
        with self._books():
            self.scheduler.prefixes.reset()

    def tend(self) -> bool:
        """For a loop with nothing else to do: note what has come or was written between tiers, and begin what
        follows from it. False: there is nothing to wait for."""
        self.scheduler.prefixes.arrive()
        return self.scheduler.prefixes.unsettled

    def close(self) -> None:
        """Bring all checkpoints to the files, where there are any, and let others use them; memory is empty
        then. Requests that run end with finish_reason "abort". The engine is not to be used afterwards."""
        for id_ in list(self.requests):
            self.abort(id_)
        self.settle()
        tiers = self.parts.tiers
        if tiers is None:
            return
        while tiers.has_files and (plan := self.scheduler.put_away()) is not None:
            self.runner.launch(plan)
            self.scheduler.launched(plan)
            self.scheduler.update(plan, {})
            self.scheduler.prefixes.write_out()
        tiers.close()

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def _sweep(self) -> None:
        while self._let_go:
            self.abort(self._let_go.pop())

    # One step

    def step(self) -> list[StreamDelta]:
        """Start one step, and return what every request got from it, or, where steps overlap, from the one
        before. [] when there is nothing to report.

        A request is out of `requests` once its last delta was returned. A failing step ends the requests
        that took part in it, with finish_reason "error", and the engine goes on.
        """
        self._sweep()
        with self._books():
            deltas: list[StreamDelta] = []
            interrupt = self._advance(deltas)
        if interrupt is not None:
            raise interrupt
        if self.options.debug:
            self.check()
        return deltas

    def settle(self) -> list[StreamDelta]:
        """Wait for the step that is still on its way, if there is one, and return what it brought."""
        deltas: list[StreamDelta] = []
        flight, self._flight = self._flight, None
        with self._books():
            interrupt = None if flight is None else self._land(flight, deltas)
        if interrupt is not None:
            raise interrupt
        return deltas

    def _advance(self, deltas: list[StreamDelta]) -> BaseException | None:
        """One step further. Returns what is no failure of the step but was raised within it."""
        before, interrupt = self._flight, None
        self._flight = None
        plan = self.scheduler.schedule()
        if plan is None and before is None and self.scheduler.prefixes.awaited:
            time.sleep(UNTIL_IT_COMES)
        if plan is not None:
            try:
                for span in plan.others:
                    if span.slot_in != span.slot_out or not span.start:  # others were scheduled before
                        self._request_of[span.request_id].note_scheduled()
                flight = self.runner.launch(plan)
            except BaseException as error:
                interrupt = self._fail(plan, error, deltas)
            else:
                self.scheduler.launched(plan)
                if flight.undrawn is not None:
                    assert before is not None, "tokens before are unknown, and no step is to bring them"
                    interrupt, before = self._land(before, deltas), None
                    try:
                        self.runner.draw(flight)
                    except BaseException as error:
                        return self._drop(flight, error, deltas) or interrupt
                if self._overlap:
                    self._flight = flight
                else:
                    before = flight
        if before is not None:
            interrupt = self._land(before, deltas) or interrupt
        return interrupt

    def _land(self, flight: Flight, deltas: list[StreamDelta]) -> BaseException | None:
        """Wait for a step and take what it brought."""
        try:
            result = flight.result()
        except BaseException as error:
            return self._drop(flight, error, deltas)
        deltas += self._take(flight.plan, result)
        return None

    def _drop(self, flight: Flight, error: BaseException, deltas: list[StreamDelta]) -> BaseException | None:
        """A step that was launched brings nothing but `error`."""
        interrupt = self._fail(flight.plan, error, deltas)
        self.scheduler.update(flight.plan, {})
        return interrupt

    def _take(self, plan: StepPlan, result: StepOutput) -> list[StreamDelta]:
        """Note what a step produced, and end what it completed. What ended while it ran gets no more."""
        deltas = []
        for id_ in result.failed:
            if id_ not in self._request_of:  # it ended with the step before, and may have left something
                self.scheduler.prefixes.discard(id_)
            else:
                request_id = self._request_of[id_].output.request_id
                log.error("request %s: logits are not finite; it ends with an error", request_id)
                deltas.append(self._end(id_, "error"))
        for id_, reports in result.prompt_logprobs.items():
            if id_ in self._request_of:
                decode = None if self.tokenizer is None else self.tokenizer.decode_one
                self._request_of[id_].note_scores(reports, decode)
        self.scheduler.update(plan, result.tokens)
        self.steps += 1
        self.tokens += plan.num_tokens
        find, logprobs = self._request_of.get, result.logprobs
        for id_, token in result.tokens.items():
            in_flight = find(id_)
            if in_flight is None:
                continue
            if in_flight.metrics.first_token_time is None:
                in_flight.note_token()
                in_flight.output.num_cached_tokens = self.scheduler.cached_tokens(id_)
            try:
                delta = in_flight.completions[id_].accept(token, logprobs.get(id_))
            except Exception:
                request_id = in_flight.output.request_id
                log.exception("request %s: its text cannot be made; it ends with an error", request_id)
                delta = self._end(id_, "error")
            else:
                if delta.finish_reason is not None:
                    self.scheduler.finish(id_, delta.finish_reason)
                    self._close(id_)
            deltas.append(delta)
        return deltas

    # What an operator sees

    def stats(self) -> dict[str, Any]:
        """Keys: slabs, pages, slots, each {total, used, cached, free}; running, waiting, swapped;
        preempted_swap, preempted_recompute; prefix, tiers (those below the device's); steps, captured_steps
        (those that ran from a graph); tokens (applied, over all steps)."""
        self._sweep()
        prefixes = self.scheduler.prefixes
        prefixes.arrive()
        graphs = self.parts.forward.graphs
        captured = 0 if graphs is None else graphs.replays
        counted = {
            "prefix": prefixes.stats(),
            "tiers": prefixes.tier_stats(),
            "steps": self.steps,
            "captured_steps": captured,
            "tokens": self.tokens,
        }
        absent = {"pages": _NONE, "slots": _NONE}  # a model without attention has no pages, say
        return absent | self.arena.stats(prefixes.only_cached()) | self.scheduler.stats() | counted

    def cache_snapshot(self) -> dict[str, Any] | None:
        """The prefix tree as it is now, see `denim.cache.snapshot`, and `tiers` as in `stats`. None without a
        cache."""
        prefixes = self.scheduler.prefixes
        if prefixes.cache is None:
            return None
        return snapshot(prefixes.cache) | {"tiers": prefixes.tier_stats()}

    def live_view(self) -> dict[str, Any]:
        """{stats, slabs, requests} as they are now: see `denim.engine.live_view`."""
        requests = request_view(self.requests.values(), self.scheduler.requests)
        return {"stats": self.stats(), "slabs": slab_view(self.arena), "requests": requests}

    def check(self) -> None:
        """Raises AssertionError when an invariant of memory or scheduler is broken."""
        self._sweep()
        self.scheduler.check()

    # Parts

    def _add_completion(
        self,
        in_flight: InFlight,
        prompt: Tokens,
        index: int,
        params: SamplingParams,
        priority: int,
        family: Family | None,
        reuse: Reuse | None,
    ) -> None:
        """Queue completion `index`; the first one also reports the prompt's log-probabilities."""
        output, ends = in_flight.output, self.defaults.end_token_ids
        max_tokens = params.most_tokens(self.scheduler.config.max_model_len - len(prompt))
        constraint = None
        if params.structured is not None:
            constraint = self.grammars.constraint(params.structured, ending_ids(params, ends))
        sampling = SamplingState(params, prompt, self.spec.vocab_size, ends, index, constraint)
        completion = Completion(output, index, params, sampling, max_tokens, ends, self.tokenizer)
        scored = params.prompt_logprobs if index == 0 else None
        id_ = next(self._ids)
        self.scheduler.add(Request(id_, prompt, max_tokens, sampling, priority, scored, family, reuse))
        in_flight.add(id_, completion)

    def _reuse(self, read: ReadPrompt, cache: CacheWishes) -> Reuse | None:
        """What one completion has to do with the prefix cache."""
        if self.options.checkpoint_policy == "none":
            return None
        marks = [*read.marks, *map(int, cache.cache_control)]
        return Reuse(Namespace(cache.cache_salt), not cache.no_store, read.boundaries, marks)

    def _fail(self, plan: StepPlan, error: BaseException, deltas: list[StreamDelta]) -> BaseException | None:
        """End every request of a step that did not complete; their memory holds nothing of use. If entries
        were to move in it, nobody's memory is certain any more, and all requests end. The prefix cache is
        emptied, as the step may have been about to write to what it holds.

        Returns `error` if it is for the caller, such as an interrupt.
        """
        ids = plan.request_ids + [swap.request_id for swap in (*plan.swap_out, *plan.swap_in)]
        ids += self._request_of if plan.moves else ()
        self.scheduler.prefixes.reset(files=False)
        ended = [self._end(id_, "error") for id_ in dict.fromkeys(ids) if id_ in self._request_of]
        deltas += ended
        if not isinstance(error, Exception):
            return error
        log.error("a step failed; %d completion(s) end with an error", len(ended), exc_info=error)
        return None

    def _end(self, id_: int, reason: str) -> StreamDelta:
        completion = self._request_of[id_].completions[id_]
        delta = completion.end(reason)
        self.scheduler.finish(id_, reason)
        self._close(id_)
        return delta

    def _close(self, id_: int) -> None:
        """Forget a finished completion, and with the last one its request."""
        in_flight = self._request_of.pop(id_)
        if in_flight.close():
            del self.requests[in_flight.output.request_id]
