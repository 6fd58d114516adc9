"""The next token of every row of a batch, worked out on the device.

Owns the order of the steps, which is vLLM's: structured output, logit bias, min_tokens, penalties,
temperature, min-p, top-k, top-p, draw; and what of a request's past they depend on. Log-probabilities are of
the logits as they came. Knows parameters and token ids; knows nothing of text, schedules or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from denim.runner.constraint import Constraint
from denim.runner.draw import Filters, draw_rows, make_filters
from denim.runner.landing import Draw, Landing
from denim.runner.largest import NO_TOKEN, largest
from denim.runner.logprobs import LogprobTensors, token_logprobs
from denim.runner.packing import sender
from denim.runner.penalties import SeenTokens, apply_penalties
from denim.runner.random import Streams
from denim.sampling_params import SamplingParams


class SamplingState:
    """How one completion is sampled, and what of its past that depends on.

    `params` are resolved (RequestError if they name a token beyond `vocab_size`). Completion `index` of
    a request draws from the stream of seed + index; `drawn` tokens were taken from it so far. `constraint`
    says what may come next (`structured`); it is this completion's own.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        vocab_size: int,
        end_token_ids: Sequence[int] = (),
        index: int = 0,
        constraint: Constraint | None = None,
    ) -> None:
        params.check_vocab(vocab_size)
        assert params.seed is not None, "resolve() fills in the seed first"
        self.params = params
        self.seed = params.seed + index
        self.drawn = 0
        self.seen = SeenTokens(prompt_ids) if params.penalised else None
        self.ending_ids = ending_ids(params, end_token_ids)
        self.constraint = constraint
        # Whether all tokens before have to be known when the next one is drawn.
        self.needs_past = self.seen is not None or constraint is not None

    def append(self, token: int) -> None:
        """Takes note that `token` was drawn: to be called once for every token that is accepted. Raises
        DeadEndError where a structured output cannot go on behind it."""
        self.drawn += 1
        if self.constraint is not None:
            self.constraint.accept(token)
        if self.seen is not None:
            self.seen.append(token)


def ending_ids(params: SamplingParams, end_token_ids: Sequence[int]) -> list[int]:
    """Tokens that end a completion: the model's own, unless it is to go on past them, and stop tokens."""
    ends = () if params.ignore_eos else end_token_ids
    return sorted({*ends, *params.stop_token_ids})


class Sampler:
    """Samples batches of one model on one device; keeps the parameter tensors of the last one, which mostly
    comes again."""

    def __init__(self) -> None:
        self._batch: _Batch | None = None
        self._landings: list[Landing] = []  # those that are free

    def draw(
        self,
        logits: Tensor,
        states: Sequence[SamplingState],
        ahead: Sequence[int] | None = None,
        best: Tensor | None = None,
    ) -> Draw:
        """The next token of each row of `logits` [R, V] (float32, bfloat16 or float16; left unchanged).

        `states` are the R sampling states. They are read, not advanced: see `SamplingState.append`. `ahead`:
        how many tokens of each were drawn that its state has not been told; None: none of any.
        `best`: `largest(logits)` where that is known already.
        """
        if self._batch is None or self._batch.states != tuple(states):  # they are equal to themselves only
            self._batch = _Batch(states, logits)
        batch = self._batch
        tokens = best = largest(logits) if best is None else best
        landing = self._take_landing(tokens)
        if not batch.plain:
            drawn = [
                state.drawn + more for state, more in zip(states, ahead or [0] * len(states), strict=True)
            ]
            tokens = _choose(logits, batch, drawn, best, landing)
        reports = _reports(logits, tokens, batch)
        top = [states[row].params.logprobs or 0 for row in batch.logprob_rows]
        return Draw(tokens, reports, batch.logprob_rows, top, landing, self._landings.append)

    def _take_landing(self, tokens: Tensor) -> Landing | None:
        if not tokens.is_cuda:
            return None
        landing = self._landings.pop() if self._landings else None
        return landing if landing is not None and len(landing.tokens) == len(tokens) else Landing(tokens)


class _Draws(NamedTuple):
    """The `rows` of a batch that are drawn at random, with filters or (None) without; `index`: the rows on
    the device."""

    rows: list[int]
    index: Tensor
    temperature: Tensor
    filters: Filters | None


class _Batch:
    """What stays the same while the same requests are sampled on the same device."""

    def __init__(self, states: Sequence[SamplingState], logits: Tensor) -> None:
        self.states = tuple(states)
        self.device = logits.device
        self.send = sender(logits.device)
        self.vocab = vocab = logits.shape[1]
        params = [state.params for state in states]
        every = range(len(params))
        random_rows = [row for row in every if not params[row].greedy]
        self.penalised_rows = [row for row in every if params[row].penalised]
        self.minimum_rows = [row for row in every if params[row].min_tokens and states[row].ending_ids]
        self.logprob_rows = [row for row in every if params[row].logprobs is not None]
        constraints = [(row, state.constraint) for row, state in enumerate(states)]
        self.constraints = [(row, one) for row, one in constraints if one is not None]
        biases = [
            (row * vocab + token, bias) for row in every for token, bias in params[row].logit_bias.items()
        ]
        # Whether there is more to do to logits than to draw from them.
        self.alters = bool(self.penalised_rows or self.minimum_rows or self.constraints or biases)
        self.plain = not (random_rows or self.alters)
        self.top_logprobs = max((params[row].logprobs or 0 for row in self.logprob_rows), default=0)

        self.logprob_index = self._tensor(self.logprob_rows, np.int64)
        if self.plain:
            return  # the largest of each row, for which nothing has to be known of the rows
        self.bias_places = self._tensor([place for place, _ in biases], np.int64)
        self.bias_values = self._tensor([bias for _, bias in biases], np.float32)
        self.streams = Streams([state.seed for state in states])
        self.uniforms = torch.empty(len(states), dtype=torch.float64, device=self.device)
        filtered = [row for row in random_rows if _filtered(params[row])]
        free = [row for row in random_rows if not _filtered(params[row])]
        chosen = [params[row] for row in filtered]
        self.draws: list[_Draws] = []
        if free:
            self.draws.append(self._draws_of(free, None))
        if filtered:
            filters = make_filters(
                [p.min_p or 0.0 for p in chosen],
                [p.top_k or 0 for p in chosen],
                [1.0 if p.top_p is None else p.top_p for p in chosen],
                vocab,
                self.device,
            )
            self.draws.append(self._draws_of(filtered, filters))

    def _draws_of(self, rows: list[int], filters: Filters | None) -> _Draws:
        temperature = [self.states[row].params.temperature for row in rows]
        return _Draws(
            rows,
            self._tensor(rows, np.int64),
            self._tensor(temperature, np.float32),
            filters,
        )

    def _tensor(self, values: Sequence[float | None], dtype: type) -> Tensor:
        return self.send(np.asarray(values, dtype=dtype))


def _choose(
    logits: Tensor, batch: _Batch, drawn: Sequence[int], best: Tensor, landing: Landing | None
) -> Tensor:
    """Tokens int64 [R] where more is asked for than `best`, the largest of `logits`; a row without one stays
    so. `drawn`: tokens before this one."""
    if batch.alters:
        logits = logits.to(torch.float32, copy=True).contiguous()
        _constrain(logits, batch)
        if len(batch.bias_places):
            logits.view(-1).index_add_(0, batch.bias_places, batch.bias_values)
        _forbid_ends(logits, batch, drawn)
        _penalise(logits, batch)
        best = torch.where(best == NO_TOKEN, best, logits.argmax(-1))
    tokens = best
    if batch.draws:
        numbers = batch.streams.uniforms(drawn)
        sent = torch.from_numpy(numbers) if landing is None else landing.holding(numbers)
        batch.uniforms.copy_(sent, non_blocking=True)
    for rows, index, temperature, filters in batch.draws:
        chosen = draw_rows(logits, index, best, temperature, filters, batch.uniforms)
        tokens = chosen if len(rows) == len(logits) else tokens.index_copy(0, index, chosen)
    return tokens


def _filtered(params: SamplingParams) -> bool:
    return bool(params.top_k) or (params.top_p or 1.0) < 1.0 or (params.min_p or 0.0) > 0.0


def _constrain(logits: Tensor, batch: _Batch) -> None:
    """Leave each row with a structured output what may come next there."""
    if not batch.constraints:
        return
    from xgrammar import apply_token_bitmask_inplace

    masks = torch.full((len(logits), -(-batch.vocab // 32)), -1, dtype=torch.int32)
    for row, constraint in batch.constraints:
        masks[row] = constraint.mask
    apply_token_bitmask_inplace(logits, batch.send(masks.numpy()), vocab_size=batch.vocab)


def _forbid_ends(logits: Tensor, batch: _Batch, drawn: Sequence[int]) -> None:
    places = [
        row * batch.vocab + token
        for row in batch.minimum_rows
        if drawn[row] < batch.states[row].params.min_tokens  # it still keeps the text from ending
        for token in batch.states[row].ending_ids
    ]
    if places:
        index = batch.send(np.asarray(places, dtype=np.int64))
        logits.view(-1).index_fill_(0, index, -torch.inf)


def _penalise(logits: Tensor, batch: _Batch) -> None:
    rows = batch.penalised_rows
    seen = [tokens for row in rows if (tokens := batch.states[row].seen) is not None]
    if seen:
        params = [batch.states[row].params for row in rows]
        apply_penalties(
            logits,
            rows,
            seen,
            [p.repetition_penalty or 1.0 for p in params],
            [p.presence_penalty for p in params],
            [p.frequency_penalty for p in params],
        )


def _reports(logits: Tensor, tokens: Tensor, batch: _Batch) -> LogprobTensors | None:
    if not batch.logprob_rows:
        return None
    asked = batch.logprob_index
    return token_logprobs(logits[asked], tokens[asked].clamp(min=0), batch.top_logprobs)
