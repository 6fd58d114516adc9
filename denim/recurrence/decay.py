"""Decay of a state over the tokens of a chunk: its four shapes, and products of tokens through it.

Owns the log-decays and every exponential of their sums. Knows packed chunks; must not know what a rule
writes into its state. Shared by the rules of `gated_accumulation` and `gated_delta`.

A state S [d_v, d_k] fades by alpha_t = exp(log_decay_t) before token t writes to it: as a whole (scalar
decay), or each of its d_k key channels by its own factor (vector decay). With G_t = the sum of log_decay
over the tokens 1..t of a chunk, what token s wrote has faded by e^{G_t - G_s} when token t reads it. So all
that a rule needs are, for rows a_t (queries, or keys again) and keys b_s,

    since_t = e^{G_t},    until_t = e^{G_C - G_t},    scores_ts = sum_c a_tc e^{G_tc - G_sc} b_sc  for s <= t

where c counts key channels and C is the chunk's length. Every one of these exponents is a sum of log-decays
over tokens, so it is <= 0 and its exponential at most 1. The difficulty is to compute it so.

Scalar decay: e^{G_t - G_s} does not depend on c, so scores = (a b^T) times the matrix of e^{G_t - G_s}. It is
taken from differences, exp(G_t - G_s) with s <= t, never as e^{G_t} e^{-G_s}, whose second factor overflows.
A difference of two rounded sums of size |G| would be wrong by up to |G| 2^-24; so each sum is made in float64
and kept as two numbers, and a difference is as exact as its own size.

Vector decay: the factor stands inside the sum over channels, so a matrix product needs it split as
(a_t e^{G_t - R}) . (b_s e^{R - G_s}), and this is safe only for an R between G_t and G_s: then both
exponents are <= 0. One R cannot lie between all pairs s < t, but one can for all pairs that lie in different
halves of a block: its value at the end of the first half. So cut the chunk into two halves, these into
quarters and so on. Each pair s < t is parted at exactly one of these cuts, and there

    G_t - G_s = (sum of log_decay from the second half's start up to t)            <= 0, belongs to a_t
              + (sum of log_decay behind s up to the first half's end)             <= 0, belongs to b_s

The diagonal, s = t, is a_t . b_t. Bottom up this takes log2(C) products of growing blocks, and both sums grow
with the blocks by additions alone: the second half's `since` gains the first half's total, the first half's
`until` the second half's. No difference of sums is taken anywhere, so that an exponent is as exact as the
log-decays in it, however strong those beside it are; and the last block's `since` and `until` are those of
the chunk. (The GLA paper, arXiv 2312.06635, cuts once, into sub-chunks with one R each, and sums the pairs
inside a sub-chunk directly; halving needs no second way.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# exp of anything below is 0 in the dtype (whose denormal numbers end at -104 and -746). A log-decay cut off
# here makes every factor that contains it exactly 0, as it was, and keeps sums finite.
MIN_LOG_DECAY = {torch.float32: -128.0, torch.float64: -1024.0}


def per_token(log_decay: Tensor | None, tokens: int, v: Tensor) -> Tensor:
    """Any of the four shapes of a log-decay as [tokens, Hv, 1 or d_k].

    log_decay: None (nothing fades), [Hv] (constant), [tokens, Hv] or [tokens, Hv, d_k]; v: [tokens, Hv, d_v].
    `denim.recurrence.operands` refuses others.
    """
    heads = v.shape[1]
    if log_decay is None:
        return torch.zeros(tokens, heads, 1, device=v.device)
    if log_decay.dim() == 1:
        return log_decay.view(1, heads, 1).expand(tokens, heads, 1)
    return log_decay.unsqueeze(-1) if log_decay.dim() == 2 else log_decay


class Fading(NamedTuple):
    """since, until: [..., C, 1 or d_k]; scores: one [..., C, C] for each of the rows. See the module."""

    since: Tensor
    until: Tensor
    scores: list[Tensor]

    @property
    def left(self) -> Tensor:
        """e^{G_C}: how much of the state before the chunk is left behind it, [..., 1, 1 or d_k]."""
        return self.since[..., -1:, :]


def fade(rows: Sequence[Tensor], keys: Tensor, log_decay: Tensor) -> Fading:
    """rows, each, and keys: [..., C, d_k]; log_decay: [..., C, 1 or d_k], <= 0.

    The leading dimensions broadcast. Scores are 0 above the diagonal.
    """
    log_decay = log_decay.clamp(min=MIN_LOG_DECAY[log_decay.dtype])
    if log_decay.shape[-1] == 1:
        return _fade_all_channels_alike(rows, keys, log_decay)
    return _fade_each_channel(rows, keys, log_decay)


def _fade_all_channels_alike(rows: Sequence[Tensor], keys: Tensor, log_decay: Tensor) -> Fading:
    # Two numbers a sum: the sum, and what rounding took off it.
    exact = log_decay.double().cumsum(-2)
    sums = exact.to(log_decay.dtype)
    rest = (exact - sums).to(log_decay.dtype)
    size = sums.shape[-2]
    later = torch.ones(size, size, dtype=torch.bool, device=sums.device).triu(1)
    decay = (sums - sums.mT).add_(rest).sub_(rest.mT).masked_fill_(later, -torch.inf).exp()
    scores = [(row @ keys.mT) * decay for row in rows]
    to_end = (sums[..., -1:, :] - sums).add_(rest[..., -1:, :]).sub_(rest)
    return Fading(sums.exp(), to_end.exp(), scores)


def _fade_each_channel(rows: Sequence[Tensor], keys: Tensor, log_decay: Tensor) -> Fading:
    size = log_decay.shape[-2]
    padding = (1 << (size - 1).bit_length()) - size  # to a power of two, by tokens that do nothing
    if padding:
        rows = [F.pad(row, (0, 0, 0, padding)) for row in rows]
        keys, log_decay = (F.pad(x, (0, 0, 0, padding)) for x in (keys, log_decay))

    # Blocks of one token: [..., blocks, tokens of a block, ...] here and below.
    since = log_decay.unsqueeze(-2)
    until = torch.zeros_like(since)
    scores = [(row * keys).sum(-1)[..., None, None].expand(*since.shape[:-1], 1) for row in rows]
    while since.shape[-3] > 1:
        length = since.shape[-2]
        since_first, since_second = _halves(since)
        until_first, until_second = _halves(until)
        earlier = keys.unflatten(-2, (-1, 2, length))[..., 0, :, :] * until_first.exp()
        reach = since_second.exp()
        for i, row in enumerate(rows):
            later = row.unflatten(-2, (-1, 2, length))[..., 1, :, :] * reach
            scores[i] = _join(*_halves(scores[i]), later @ earlier.mT)
        first_total, second_total = since_first[..., -1:, :], since_second[..., -1:, :]
        since = torch.cat((since_first, since_second + first_total), -2)
        until = torch.cat((until_first + second_total, until_second), -2)
    since, until = (x.squeeze(-3)[..., :size, :].exp() for x in (since, until))
    return Fading(since, until, [x.squeeze(-3)[..., :size, :size] for x in scores])


def _halves(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[..., blocks, a, b] to the first and the second of each pair of blocks, [..., blocks / 2, a, b]."""
    first, second = blocks.unflatten(-3, (-1, 2)).unbind(-3)
    return first, second


def _join(first: Tensor, second: Tensor, corner: Tensor) -> Tensor:
    """[[first, 0], [corner, second]] of square blocks, all [..., a, a]."""
    upper = torch.cat((first, torch.zeros_like(corner)), -1)
    return torch.cat((upper, torch.cat((corner, second), -1)), -2)
