"""Penalties on tokens that were seen: which tokens, how often, and what it does to the logits.

Counts live on the host as short arrays of the distinct tokens seen, so they survive whatever happens
to a request on the device, and a step touches only those logits. Knows nothing of the rest of sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_FIRST_CAPACITY = 64


class SeenTokens:
    """The distinct tokens of one request, and how often each was generated.

    `ids` int64 [capacity], `counts` float32 [capacity]; the first `size` entries are in use. A token
    of the prompt that was not generated has count 0.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        distinct = list(dict.fromkeys(prompt_ids))
        self.size = len(distinct)
        self.ids = np.zeros(max(_FIRST_CAPACITY, 2 * self.size), dtype=np.int64)
        self.counts = np.zeros(len(self.ids), dtype=np.float32)
        self.ids[: self.size] = distinct
        self._place = {token: place for place, token in enumerate(distinct)}

    def append(self, token: int) -> None:
        """Counts one more generated token."""
        place = self._place.setdefault(token, self.size)
        if place == self.size:
            if self.size == len(self.ids):
                self.ids = np.concatenate([self.ids, np.zeros_like(self.ids)])
                self.counts = np.concatenate([self.counts, np.zeros_like(self.counts)])
            self.ids[place] = token
            self.size += 1
        self.counts[place] += 1


def apply_penalties(
    logits: Tensor,
    rows: Sequence[int],
    seen: Sequence[SeenTokens],
    repetition: Sequence[float],
    presence: Sequence[float],
    frequency: Sequence[float],
) -> None:
    """Penalises, in place, row rows[i] of `logits` [R, V] float32 (contiguous) for the tokens seen[i].

    Repetition (Keskar et al. 2019, arXiv 1909.05858): positive logits are divided by the penalty, others
    multiplied, for tokens of prompt and output. Then, as in the OpenAI API, for generated tokens:
    logit - frequency * count - presence * (count > 0).
    """
    vocab = logits.shape[1]
    sizes = [tokens.size for tokens in seen]
    places = np.concatenate(
        [tokens.ids[: tokens.size] + row * vocab for tokens, row in zip(seen, rows, strict=True)]
    )
    numbers = np.empty((4, len(places)), dtype=np.float32)
    np.concatenate([tokens.counts[: tokens.size] for tokens in seen], out=numbers[0])
    for line, values in enumerate((repetition, presence, frequency), start=1):
        numbers[line] = np.repeat(np.asarray(values, dtype=np.float32), sizes)

    index = torch.from_numpy(places).to(logits.device)
    count, repeat, present, frequent = torch.from_numpy(numbers).to(logits.device)
    flat = logits.view(-1)
    value = flat[index]
    value = torch.where(value > 0, value / repeat, value * repeat)
    flat[index] = value - frequent * count - present * (count > 0)
