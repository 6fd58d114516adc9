"""Log-probabilities as they are reported: of the model's own logits, before any sampling parameter.

Owns the form of the report and how it is computed; knows nothing of sampling or of text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class TokenLogprobs(NamedTuple):
    """One token's log-probability (nats), its rank (1: no token is likelier), and the likeliest tokens."""

    token: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]

    def shortened(self, k: int) -> TokenLogprobs:
        """The same with at most the `k` likeliest tokens."""
        return self._replace(top_ids=self.top_ids[:k], top_logprobs=self.top_logprobs[:k])


class LogprobTensors(NamedTuple):
    """The same for several rows, still on the device, so that a caller may go on before it waits."""

    tokens: Tensor
    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def to_host(self) -> list[TokenLogprobs]:
        return [TokenLogprobs(*row) for row in zip(*(part.tolist() for part in self), strict=True)]


def token_logprobs(logits: Tensor, tokens: Tensor, k: int) -> LogprobTensors:
    """Log-probabilities of `tokens` int64 [R] and of the `k` likeliest tokens, from `logits` [R, V]."""
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(-1, tokens[:, None])
    ranks = 1 + (logprobs > own).sum(-1)
    top = logprobs.topk(min(k, logits.shape[-1]), dim=-1)
    return LogprobTensors(tokens, own[:, 0], ranks, top.indices, top.values)


def prompt_logprobs(logits: Tensor, next_ids: Sequence[int], k: int) -> list[TokenLogprobs]:
    """For each position of a prompt, the report on the token that follows it.

    `logits` [L, V] float32 or bfloat16 of L positions, `next_ids` the L tokens that follow them. The first
    token of a prompt has no report. Needs L x V numbers more, so long prompts come in parts.
    """
    tokens = torch.tensor(next_ids, dtype=torch.int64, device=logits.device)
    return token_logprobs(logits, tokens, k).to_host()
