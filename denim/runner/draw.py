"""One token from each of several distributions: the draw, with min-p, top-k and top-p before it.

The filters keep a beginning of one order, by logit downwards and among equals by id upwards; the draw
inverts the cumulative distribution in that order. Few tokens decide, so they are looked for among the
largest logits first, and a row is sorted whole only where those do not settle it. A row without filters
is drawn in the order of ids and never sorted. On a CUDA device kernels find the same places without
sorting, and the host does not wait for them.

Weights are rounded to integers first, so that sums are exact in whatever order a device adds: a row
gives the same token alone and in any batch. Knows logits and numbers; knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from denim.recurrence.backend import in_kernels

# The largest logits that are looked at first, and by how much more where those do not settle a row.
# Top-k needs a few more than k, to see which tokens equal the last one.
_FEWEST_CANDIDATES = 64
_GROWTH = 16
_SUM_BITS = 62  # the sum of a row's weights stays below 2^62, inside int64


class Filters(NamedTuple):
    """Filters of R rows, each tensor [R, 1]; top_k is V where there is none.

    `min_log` float32: log(min_p). `top_k` int64. `top_p` float64. `candidates`: how many of a row's
    largest logits are looked at first, at least each top_k below V. `needs_total`: a row has no top_k.
    """

    min_log: Tensor
    top_k: Tensor
    top_p: Tensor
    candidates: int
    needs_total: bool

    def rows(self, index: Tensor) -> Filters:
        return self._replace(min_log=self.min_log[index], top_k=self.top_k[index], top_p=self.top_p[index])


def make_filters(
    min_p: Sequence[float], top_k: Sequence[int], top_p: Sequence[float], vocab: int, device: torch.device
) -> Filters:
    """The filters of R rows over `vocab` tokens; a top_k of 0, or of `vocab` and more, keeps all."""
    counts = [min(k or vocab, vocab) for k in top_k]
    largest_k = max((count for count in counts if count < vocab), default=0)
    return Filters(
        min_log=torch.tensor(min_p, dtype=torch.float32, device=device).log()[:, None],
        top_k=torch.tensor(counts, dtype=torch.int64, device=device)[:, None],
        top_p=torch.tensor(top_p, dtype=torch.float64, device=device)[:, None],
        candidates=min(max(_FEWEST_CANDIDATES, 2 * largest_k), vocab),
        needs_total=vocab in counts,
    )


def draw_rows(
    logits: Tensor,
    rows: Tensor,
    best: Tensor,
    temperature: Tensor,
    filters: Filters | None,
    uniforms: Tensor,
) -> Tensor:
    """Tokens int64 [N] of the `rows` int64 [N] of `logits` [R, V], each divided by its temperature.

    logits: float32, bfloat16 or float16. best: int64 [R], where each row has its largest; a row for which it
    is negative, as it has none, gets it as its token. temperature: float32 [N]. filters: of the N rows; None:
    none of them has any. uniforms: float64 [R] in [0, 1), which decide.
    """
    if in_kernels(logits):
        from denim.runner.kernels.draw_filtered import draw_filtered_rows
        from denim.runner.kernels.draw_free import draw_free_rows

        unit = unit_of(logits.shape[1])
        if filters is None:
            return draw_free_rows(logits, rows, best, temperature, uniforms, unit)
        places = filters.min_log, filters.top_k, filters.top_p  # [N, 1], as good as [N] for a kernel
        return draw_filtered_rows(logits, rows, best, temperature, *places, uniforms, unit)
    scaled = logits[rows].to(torch.float32).div_(temperature[:, None])
    numbers = uniforms[rows][:, None]
    tokens = draw(scaled, numbers) if filters is None else draw_filtered(scaled, filters, numbers)
    return torch.where(best[rows] < 0, best[rows], tokens)


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens int64 [R], drawn from softmax(logits [R, V] float32).

    `uniforms` float64 [R, 1] in [0, 1) decide. A row of NaN gives any token.
    """
    sums = _weights(logits - logits.amax(-1, keepdim=True), logits.shape[1]).cumsum_(-1)
    place = torch.searchsorted(sums, _target(uniforms, sums[:, -1:]), right=True)
    return place[:, 0].clamp(max=logits.shape[1] - 1)


def draw_filtered(logits: Tensor, filters: Filters, uniforms: Tensor) -> Tensor:
    """Tokens int64 [R], drawn from softmax(logits [R, V] float32) after the filters.

    Top-p takes its share of what min-p and top-k have left, as in vLLM. `uniforms` as in `draw`.
    """
    vocab = logits.shape[1]
    logits = logits - logits.amax(-1, keepdim=True)
    total = None
    if filters.needs_total:
        total = _weights(logits, vocab).masked_fill_(logits < filters.min_log, 0).sum(-1, keepdim=True)
    drawn = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    rows, size = torch.arange(len(logits), device=logits.device), filters.candidates
    while True:
        values, ids = _largest(logits, size)
        tokens, certain = _draw_ordered(values, ids, total, filters, uniforms, vocab)
        drawn[rows] = tokens
        if bool(certain.all()):
            return drawn
        left = ~certain
        rows, logits, filters, uniforms = rows[left], logits[left], filters.rows(left), uniforms[left]
        total = None if total is None else total[left]
        size = vocab if size * _GROWTH * 2 > vocab else size * _GROWTH


def _largest(logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The `size` largest logits of each row and their tokens, in the filters' order.

    Which of the tokens that equal the smallest of them are among them is left open, if size < V.
    """
    if size == logits.shape[1]:
        return logits.sort(dim=-1, descending=True, stable=True)
    values, ids = logits.topk(size, -1)
    ids, order = ids.sort(-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def _draw_ordered(
    values: Tensor, ids: Tensor, total: Tensor | None, filters: Filters, uniforms: Tensor, vocab: int
) -> tuple[Tensor, Tensor]:
    """Tokens int64 [R] from the C first of a row, and bool [R] whether more of it could change them.

    `values` [R, C] are logits less their maximum in the filters' order, `ids` their tokens, `total`
    [R, 1] the weight of all tokens that min-p keeps (None: every row has a top_k).
    """
    seen = values.shape[1]
    sums = _weights(values, vocab).masked_fill_(values < filters.min_log, 0).cumsum(-1)
    left = sums.gather(-1, (filters.top_k - 1).clamp(max=seen - 1))
    if total is not None:
        left = torch.where(filters.top_k < vocab, left, total)
    # The last token that stays is the first at which the sum reaches its share.
    last = (sums < filters.top_p * left).sum(-1, keepdim=True)
    inside = last.clamp(max=seen - 1)
    place = torch.searchsorted(sums, _target(uniforms, sums.gather(-1, inside)), right=True)
    tokens = ids.gather(-1, place.clamp(max=seen - 1))[:, 0]
    # Tokens equal to the smallest one seen may be missing.
    certain = (last < seen) & (values.gather(-1, inside) > values[:, -1:])
    return tokens, certain[:, 0] | (seen == vocab)


def unit_of(vocab: int) -> float:
    """The weight of the largest logit, a power of two; `vocab` of them sum to less than 2^62."""
    return 2.0 ** (_SUM_BITS - vocab.bit_length())


def _weights(logits: Tensor, vocab: int) -> Tensor:
    """exp(logits) for logits of at most 0, as int64; `vocab` of them sum to less than 2^62."""
    return logits.exp().mul_(unit_of(vocab)).to(torch.int64)


def _target(uniforms: Tensor, total: Tensor) -> Tensor:
    """Integers [R, 1] in [0, total)."""
    return torch.minimum((uniforms * total).to(torch.int64), total - 1)
