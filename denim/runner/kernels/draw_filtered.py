"""A draw with min-p, top-k and top-p before it, from start to end on the device.

Owns the search for the places in a row's order (by logit downwards, among equals by id upwards) that the
filters and the draw ask for. Nothing is sorted: a place is where a sum over all larger logits passes a
number, and that is found bit by bit. The definition is `denim.runner.draw`; weights are the same integers.

One program a row. The largest logits are put together first, up to `_KEPT` of them, and the search runs over
those alone where they hold all that is asked for; else all of the row's are put together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_KEPT = 16384
_BLOCK = 4096
_BINS = 128  # of the distance to the largest logit, for the choice of what is put together
_BINS_A_NAT = 4
_WARPS = 16


@triton.jit
def _key(y):
    """Integers in the order of y <= 0, all of them negative."""
    bits = (y + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) - 1


@triton.jit
def weight(y, unit, least):
    """Integers in proportion to exp(y), 0 below `least`, if that is not None."""
    share = tl.exp(y) * unit
    if least is not None:
        share = tl.where(y >= least, share, 0.0)
    return share.to(tl.int64)


@triton.jit
def scaled(x_ptr, at, n, temperature):
    """Logits divided as the definition divides them; -inf beyond the `n`-th."""
    return tl.div_rn(tl.load(x_ptr + at, mask=at < n, other=float("-inf")).to(tl.float32), temperature)


@triton.jit
def _values(y_ptr, at, n):
    return tl.load(y_ptr + at, mask=at < n, other=float("-inf"))


@triton.jit
def _put_together(
    row_ptr, kept_ptr, ids_ptr, count_ptr, vocab, temperature, shift, lowest, block: tl.constexpr
):
    """The values with a key of at least `lowest`, in no order, and their ids. How many there are."""
    tl.store(count_ptr, 0)
    tl.debug_barrier()
    for first in range(0, vocab, block):
        at = first + tl.arange(0, block)
        y = scaled(row_ptr, at, vocab, temperature) - shift
        keep = (at < vocab) & (_key(y) >= lowest)
        place = tl.atomic_add(count_ptr + tl.zeros([block], tl.int32), 1, mask=keep, sem="relaxed")
        tl.store(kept_ptr + place, y, mask=keep)
        tl.store(ids_ptr + place, at, mask=keep)
    tl.debug_barrier()  # others of the program's threads read what these wrote
    return tl.load(count_ptr, volatile=True)


@triton.jit
def _key_of_rank(keys, rank):
    """The largest key of which, and of larger ones, there are at least `rank` among `keys`."""
    key = tl.full([], -2147483648, tl.int32)
    for step in range(16):
        bits = 30 - 2 * step
        one, two, three = key + (1 << bits), key + (2 << bits), key + (3 << bits)
        if tl.sum((keys >= three).to(tl.int32), 0) >= rank:
            key = three
        elif tl.sum((keys >= two).to(tl.int32), 0) >= rank:
            key = two
        elif tl.sum((keys >= one).to(tl.int32), 0) >= rank:
            key = one
    return key


@triton.jit
def _sum_from(y_ptr, n, least, unit, key, by_count: tl.constexpr, block: tl.constexpr):
    """How many values have a key of at least `key`, or the sum of their weights."""
    total = tl.zeros([block], tl.int64)
    for first in range(0, n, block):
        at = first + tl.arange(0, block)
        y = _values(y_ptr, at, n)
        measure = (at < n).to(tl.int64) if by_count else weight(y, unit, least)
        total += tl.where(_key(y) >= key, measure, 0)
    return tl.sum(total, 0)


@triton.jit
def _place(y_ptr, n, least, unit, wanted, by_count: tl.constexpr, block: tl.constexpr):
    """The largest key from which on the sum is at least `wanted`; found two bits at a time."""
    key = tl.full([], -2147483648, tl.int32)
    for step in range(16):
        bits = 30 - 2 * step
        one, two, three = key + (1 << bits), key + (2 << bits), key + (3 << bits)
        above_one = tl.zeros([block], tl.int64)
        above_two = tl.zeros([block], tl.int64)
        above_three = tl.zeros([block], tl.int64)
        for first in range(0, n, block):
            at = first + tl.arange(0, block)
            y = _values(y_ptr, at, n)
            measure = (at < n).to(tl.int64) if by_count else weight(y, unit, least)
            own = _key(y)
            above_one += tl.where(own >= one, measure, 0)
            above_two += tl.where(own >= two, measure, 0)
            above_three += tl.where(own >= three, measure, 0)
        if tl.sum(above_three, 0) >= wanted:
            key = three
        elif tl.sum(above_two, 0) >= wanted:
            key = two
        elif tl.sum(above_one, 0) >= wanted:
            key = one
    return key


@triton.jit
def _weight_of(key, least, unit):
    """The weight of values with this key."""
    bits = key + 1
    y = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return weight(y, unit, least)


@triton.jit
def _draw(
    logits_ptr,
    row_stride,
    rows_ptr,
    best_ptr,
    temperature_ptr,
    least_ptr,
    top_k_ptr,
    top_p_ptr,
    uniform_ptr,
    kept_ptr,
    ids_ptr,
    count_ptr,
    tokens_ptr,
    vocab,
    unit,
    most_kept: tl.constexpr,
    bins: tl.constexpr,
    bins_a_nat: tl.constexpr,
    block: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + program)
    row_ptr = logits_ptr + row * row_stride
    kept_ptr += program * vocab
    ids_ptr += program * vocab
    count_ptr += program
    temperature = tl.load(temperature_ptr + program)
    least = tl.load(least_ptr + program)
    top_k = tl.load(top_k_ptr + program)
    lane = tl.arange(0, block)

    best = tl.load(best_ptr + row)
    shift = scaled(row_ptr, tl.maximum(best, 0), vocab, temperature)

    # What is put together are the values from a key on, as few as surely decide.
    top_p = tl.load(top_p_ptr + program)
    everything = tl.sum(tl.zeros([block], tl.int64), 0)
    if (top_k < vocab) & (top_k <= block):
        # The largest value of each lane: the k-th of those is no larger than the row's k-th.
        top = tl.full([block], float("-inf"), tl.float32)
        for first in range(0, vocab, block):
            top = tl.maximum(top, scaled(row_ptr, first + lane, vocab, temperature) - shift)
        lowest = _key_of_rank(_key(top), top_k)
    else:
        # How many values lie in each bin below the largest, and the weight of all.
        counts = tl.zeros([bins], tl.int32)
        total = tl.zeros([block], tl.int64)
        for first in range(0, vocab, block):
            at = first + lane
            y = scaled(row_ptr, at, vocab, temperature) - shift
            total += weight(y, unit, least)
            bin = tl.maximum(tl.minimum(-y * bins_a_nat, bins - 1.0).to(tl.int32), 0)
            counts += tl.histogram(tl.where(at < vocab, bin, bins - 1), bins)
        everything = tl.sum(total, 0)
        # No more bins than the search is quick in. Every value of bin b weighs at least
        # exp(-(b + 1) / bins_a_nat).
        so_far = tl.cumsum(counts, 0)
        surely = tl.cumsum(counts * tl.exp(-(tl.arange(0, bins) + 1.0) / bins_a_nat) * unit, 0)
        share = (top_p * everything.to(tl.float64)).to(tl.float32)
        short = tl.where(top_k < vocab, so_far < top_k, surely < share)
        used_bins = tl.sum(((so_far <= most_kept) & (so_far >= 0)).to(tl.int32), 0)
        used_bins = tl.minimum(used_bins, tl.sum(short.to(tl.int32), 0) + 1)
        lowest = _key(used_bins.to(tl.float32) / -bins_a_nat) + 1
    count = _put_together(row_ptr, kept_ptr, ids_ptr, count_ptr, vocab, temperature, shift, lowest, block)

    # Do the values that were put together decide? They hold every prefix of the order of at most `count`.
    if top_k < vocab:
        enough = count >= top_k
    else:
        kept_weight = tl.sum(tl.zeros([block], tl.int64), 0)
        for first in range(0, count, block):
            kept_weight += tl.sum(weight(_values(kept_ptr, first + lane, count), unit, least), 0)
        enough = kept_weight >= tl.ceil(top_p * everything.to(tl.float64)).to(tl.int64)
    if not enough:
        tl.debug_barrier()  # all have read what is written over
        lowest = tl.full([], -2147483648, tl.int32)
        count = _put_together(row_ptr, kept_ptr, ids_ptr, count_ptr, vocab, temperature, shift, lowest, block)

    # The weight of what top-k leaves.
    left = everything
    if top_k < vocab:
        key = _place(kept_ptr, count, least, unit, top_k, True, block)
        more = _sum_from(kept_ptr, count, least, unit, key + 1, True, block)
        left = _sum_from(kept_ptr, count, least, unit, key + 1, False, block)
        left += (top_k - more) * _weight_of(key, least, unit)
    # The weight up to the first value at which the sum reaches the share of top-p.
    share = tl.maximum(tl.ceil(top_p * left.to(tl.float64)).to(tl.int64), 1)
    share = tl.minimum(share, left)
    key = _place(kept_ptr, count, least, unit, share, False, block)
    before = _sum_from(kept_ptr, count, least, unit, key + 1, False, block)
    each = tl.maximum(_weight_of(key, least, unit), 1)
    left = before + (share - before + each - 1) // each * each
    # The draw.
    target = (tl.load(uniform_ptr + row) * left.to(tl.float64)).to(tl.int64)
    target = tl.maximum(tl.minimum(target, left - 1), 0)
    key = _place(kept_ptr, count, least, unit, target + 1, False, block)
    before = _sum_from(kept_ptr, count, least, unit, key + 1, False, block)
    each = tl.maximum(_weight_of(key, least, unit), 1)
    rank = (target - before) // each
    # Of the values with that key the one with `rank` smaller ids: the smallest id up to which there are more.
    token = tl.full([], 0, tl.int32)
    for step in range(31):
        middle = token + (1 << (30 - step))
        smaller = tl.zeros([block], tl.int64)
        for first in range(0, count, block):
            at = first + lane
            own = _key(_values(kept_ptr, at, count))
            id = tl.load(ids_ptr + at, mask=at < count, other=0)
            smaller += ((own == key) & (id < middle) & (at < count)).to(tl.int64)
        if tl.sum(smaller, 0) <= rank:
            token = middle
    token = tl.minimum(token, vocab - 1).to(tl.int64)
    tl.store(tokens_ptr + program, tl.where(best < 0, best, token))


def draw_filtered_rows(
    logits: Tensor,
    rows: Tensor,
    best: Tensor,
    temperature: Tensor,
    min_log: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    uniforms: Tensor,
    unit: float,
) -> Tensor:
    """Tokens int64 [N] of the `rows` int64 [N] of `logits` [R, V] float32, bfloat16 or float16, dense in V;
    see `denim.runner.draw.draw_filtered`.

    best int64 [R]: where each row has its largest logit; a row for which it is negative gets it as its token.
    temperature, min_log [N] float32; top_k [N] int64, at most V (V: no top-k); top_p [N] float64; uniforms
    [R] float64; all dense. `unit`: the weight of the largest logit, so that V of them sum to less than 2^62.
    """
    count, vocab = len(rows), logits.shape[1]
    assert logits.stride(1) == 1
    kept = torch.empty(count, vocab, dtype=torch.float32, device=logits.device)
    ids = torch.empty(count, vocab, dtype=torch.int32, device=logits.device)
    block = min(_BLOCK, max(32, triton.next_power_of_2(vocab)))
    counts = torch.empty(count, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    _draw[(count,)](
        logits,
        logits.stride(0),
        rows,
        best,
        temperature,
        min_log,
        top_k,
        top_p,
        uniforms,
        kept,
        ids,
        counts,
        tokens,
        vocab,
        unit,
        most_kept=_KEPT,
        bins=_BINS,
        bins_a_nat=_BINS_A_NAT,
        block=block,
        num_warps=min(_WARPS, block // 32),  # no lane twice, or it would count twice
    )
    return tokens
