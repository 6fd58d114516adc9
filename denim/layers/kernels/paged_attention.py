"""Softmax attention over paged KV: one kernel for decode rows and for segments, flash-style.

Owns the kernel and its tiles. Flash attention: Dao 2023 (arXiv 2307.08691); keys split over programs:
Flash-Decoding (Dao et al. 2023).

Work is cut into units: (span, tile of its query rows, split of its keys, KV head). The query heads that share
a KV head are rows of one tile, so that a tile of 16 rows is 16 / group tokens. Every program computes from
`q_indptr` and `kv_lens` alone which units are its own: nothing is planned, and a captured graph may be
replayed with other lengths. How a span is cut depends on its own lengths only, so that a row's result, bit by
bit, does not depend on the other rows of a step.

Splits of one tile leave partial sums in a workspace; whichever program finishes last adds them up, in the
order of splits, and sets the tile's counter back to zero.

Keys behind a span's length are never used, whatever lies there: scores are masked, values are not loaded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from denim.recurrence.kernels.overlap import overlaps

LOG2_E = 1.4426950408889634
# Units that keep a large device (132 multiprocessors) busy: one span alone is cut into about so many.
WAVE = 128
# Splits are multiples of this, and every block of keys divides it.
SPLIT_STEP = 128
MERGE_ROWS = 16  # rows whose partial sums are added up at one time
MERGE_NUMBERS = 64  # of partial sums in registers of one thread meanwhile
SPANS = 256  # spans that a program looks at together; more are a variant of the kernel for each power of two
LEAST_DOT = 16  # the shortest side of a product on tensor cores


class Tiles(NamedTuple):
    """Shape of a unit's work: query rows (token, head of the group), keys of one block, fewest keys of a
    split; warps and pipeline stages of a program."""

    rows: int
    keys: int
    least_split: int
    warps: int
    stages: int


@triton.jit
def _cdiv(a, b):
    return (a + b - 1) // b


@triton.jit
def _split_of(kv_len, tiles, kv_heads: tl.constexpr, wave, least: tl.constexpr, step: tl.constexpr):
    """Keys of a split, from a span's own lengths."""
    wanted = _cdiv(_cdiv(kv_len * tiles * kv_heads, wave), step) * step
    return tl.maximum(wanted, least)


@triton.jit
def _attend_block(
    q,
    q_extra,
    top,
    total,
    acc,
    page,
    k_ptr,
    v_ptr,
    page_ids_ptr,
    start,
    end,
    limit,
    scale,
    page_stride,
    token_stride,
    page_size: tl.constexpr,
    dim: tl.constexpr,
    extra_dim: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    block_extra: tl.constexpr,
    shared: tl.constexpr,
    masked: tl.constexpr,
    precision: tl.constexpr,
):
    """Keys start .. start + block_n, in `page`: running maximum, sum and weighted values go on.

    `masked`: keys from `end` on do not exist, and row r sees keys below limit[r] only. Returns the next
    block's pages as well: loaded a block ahead, they do not stand in the way of the loads of keys and
    values."""
    keys = start + tl.arange(0, block_n)
    d = tl.arange(0, block_d)
    ahead = keys + block_n
    next_page = tl.load(page_ids_ptr + ahead // page_size, mask=ahead < end, other=0)
    place = page.to(tl.int64) * page_stride + (keys % page_size) * token_stride
    at = place[:, None] + d[None, :]
    if masked or dim < block_d:
        inside = (keys < end)[:, None] & (d < dim)[None, :]
        k = tl.load(k_ptr + at, mask=inside, other=0.0)
    else:
        k = tl.load(k_ptr + at)
    k = k.to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision=precision)
    if extra_dim > 0:
        e = tl.arange(0, block_extra)
        inside_extra = (keys < end)[:, None] & (e < extra_dim)[None, :]
        k_extra = tl.load(k_ptr + dim + place[:, None] + e[None, :], mask=inside_extra, other=0.0).to(q.dtype)
        scores = tl.dot(q_extra, tl.trans(k_extra), scores, input_precision=precision)
    scores = scores * scale
    if masked:
        scores = tl.where(keys[None, :] < limit[:, None], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    shift = new_top
    if masked:
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen no key yet
    weights = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(top - shift)
    total = total * fade + tl.sum(weights, 1)
    acc = acc * fade[:, None]
    if shared:
        v = k
    elif masked or dim < block_d:
        inside = (keys < end)[:, None] & (d < dim)[None, :]
        v = tl.load(v_ptr + at, mask=inside, other=0.0).to(q.dtype)
    else:
        v = tl.load(v_ptr + at).to(q.dtype)
    acc = tl.dot(weights.to(q.dtype), v, acc, input_precision=precision)
    return new_top, total, acc, next_page


@triton.jit
def _write(
    out_ptr,
    gate_ptr,
    result,
    token,
    head,
    d,
    mask,
    out_token_stride,
    out_head_stride,
    gate_token_stride,
    gate_head_stride,
    gated: tl.constexpr,
):
    if gated:
        gate_at = token[:, None] * gate_token_stride + head[:, None] * gate_head_stride + d[None, :]
        result = result * tl.sigmoid(tl.load(gate_ptr + gate_at, mask=mask, other=0.0).to(tl.float32))
    out_at = token[:, None] * out_token_stride + head[:, None] * out_head_stride + d[None, :]
    tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=mask)


# A variant of the kernel for every length of a list or place in it would be compiled otherwise.
@triton.jit(
    do_not_specialize=["num_spans", "wave"],
    do_not_specialize_on_alignment=["q_indptr_ptr", "kv_lens_ptr", "page_ids_ptr", "page_indptr_ptr"],
)
def _paged_attention(
    q_ptr,
    k_ptr,
    v_ptr,
    gate_ptr,
    out_ptr,
    q_indptr_ptr,
    kv_lens_ptr,
    page_ids_ptr,
    page_indptr_ptr,
    partial_ptr,
    stats_ptr,
    counters_ptr,
    num_spans,
    scale,
    wave,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    gate_token_stride,
    gate_head_stride,
    page_stride,
    token_stride,
    head_stride,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    dim: tl.constexpr,
    extra_dim: tl.constexpr,
    page_size: tl.constexpr,
    max_spans: tl.constexpr,
    block_m: tl.constexpr,
    kept_rows: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    block_extra: tl.constexpr,
    least_split: tl.constexpr,
    split_step: tl.constexpr,
    merge_rows: tl.constexpr,
    merge_splits: tl.constexpr,
    shared: tl.constexpr,
    gated: tl.constexpr,
    precision: tl.constexpr,
    overlap: tl.constexpr,
):
    if overlap:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    # Every span's units; a span without tokens or keys has none.
    n = tl.arange(0, max_spans)
    there = n < num_spans
    q_begin = tl.load(q_indptr_ptr + n, mask=there, other=0)
    q_end = tl.load(q_indptr_ptr + n + 1, mask=there, other=0)
    kv_len = tl.load(kv_lens_ptr + n, mask=there, other=0)
    tiles = _cdiv((q_end - q_begin) * group, block_m)
    split = _split_of(kv_len, tiles, kv_heads, wave, least_split, split_step)
    splits_of_row = _cdiv(kv_len, split)
    units = tiles * splits_of_row
    ends = tl.cumsum(units, 0)
    all_units = tl.sum(units, 0)
    kept = tl.where(splits_of_row > 1, units, 0)  # units with a place in the workspace

    d = tl.arange(0, block_d)
    e = tl.arange(0, block_extra)
    m = tl.arange(0, block_m)
    for work in range(tl.program_id(0), all_units * kv_heads, tl.num_programs(0)):
        # The last units come first: in a segment they have the most keys, and the short ones fill the gaps.
        unit = all_units - 1 - work // kv_heads
        kv_head = work % kv_heads
        row = tl.sum((ends <= unit).to(tl.int32), 0)
        unit_in_row = unit - tl.sum(tl.where(n < row, units, 0), 0)
        kept_before = tl.sum(tl.where(n < row, kept, 0), 0)
        row_begin = tl.load(q_indptr_ptr + row)
        tokens = tl.load(q_indptr_ptr + row + 1) - row_begin
        length = tl.load(kv_lens_ptr + row)
        table_ptr = page_ids_ptr + tl.load(page_indptr_ptr + row)
        row_split = _split_of(length, _cdiv(tokens * group, block_m), kv_heads, wave, least_split, split_step)
        row_splits = _cdiv(length, row_split)
        tile = unit_in_row // row_splits
        which = unit_in_row % row_splits

        rows = tile * block_m + m
        valid = rows < tokens * group
        local = tl.minimum(rows // group, tokens - 1)
        limit = length - tokens + local + 1  # keys that a row sees
        last = tl.minimum((tile * block_m + block_m - 1) // group, tokens - 1)
        visible = length - tokens + last + 1  # keys that the tile sees
        everywhere = length - tokens + tile * block_m // group + 1  # keys that each of its rows sees
        splits = _cdiv(visible, row_split)
        if which < splits:
            token = (row_begin + local).to(tl.int64)
            head = kv_head * group + rows % group
            q_at = token[:, None] * q_token_stride + head[:, None] * q_head_stride
            q = tl.load(q_ptr + q_at + d[None, :], mask=valid[:, None] & (d < dim)[None, :], other=0.0)
            q_extra = q
            if extra_dim > 0:
                q_extra = tl.load(
                    q_ptr + q_at + dim + e[None, :], mask=valid[:, None] & (e < extra_dim)[None, :], other=0.0
                )
            k_head_ptr = k_ptr + kv_head * head_stride
            v_head_ptr = v_ptr + kv_head * head_stride
            begin = which * row_split
            end = tl.minimum(begin + row_split, visible)
            middle = tl.minimum(begin + tl.maximum(everywhere - begin, 0) // block_n * block_n, end)
            middle = begin + (middle - begin) // block_n * block_n

            keys = begin + tl.arange(0, block_n)
            page = tl.load(table_ptr + keys // page_size, mask=keys < end, other=0)
            top = tl.full([block_m], float("-inf"), tl.float32)
            total = tl.zeros([block_m], tl.float32)
            acc = tl.zeros([block_m, block_d], tl.float32)
            for start in range(begin, middle, block_n):
                top, total, acc, page = _attend_block(
                    q,
                    q_extra,
                    top,
                    total,
                    acc,
                    page,
                    k_head_ptr,
                    v_head_ptr,
                    table_ptr,
                    start,
                    end,
                    limit,
                    scale,
                    page_stride,
                    token_stride,
                    page_size,
                    dim,
                    extra_dim,
                    block_n,
                    block_d,
                    block_extra,
                    shared,
                    False,
                    precision,
                )
            for start in range(middle, end, block_n):
                top, total, acc, page = _attend_block(
                    q,
                    q_extra,
                    top,
                    total,
                    acc,
                    page,
                    k_head_ptr,
                    v_head_ptr,
                    table_ptr,
                    start,
                    end,
                    limit,
                    scale,
                    page_stride,
                    token_stride,
                    page_size,
                    dim,
                    extra_dim,
                    block_n,
                    block_d,
                    block_extra,
                    shared,
                    True,
                    precision,
                )

            if splits == 1:
                _write(
                    out_ptr,
                    gate_ptr,
                    acc / total[:, None],
                    token,
                    head,
                    d,
                    valid[:, None] & (d < dim)[None, :],
                    out_token_stride,
                    out_head_stride,
                    gate_token_stride,
                    gate_head_stride,
                    gated,
                )
            else:
                # Places in the workspace: one a unit and KV head; a tile's counter is at its first unit.
                first = (kept_before + unit_in_row - which) * kv_heads + kv_head
                place = (first + which * kv_heads).to(tl.int64) * kept_rows
                tl.store(partial_ptr + (place + m)[:, None] * block_d + d[None, :], acc, mask=valid[:, None])
                tl.store(stats_ptr + (place + m) * 2, top, mask=valid)
                tl.store(stats_ptr + (place + m) * 2 + 1, total, mask=valid)
                tl.debug_barrier()  # all warps' partial sums before one of them says that they are there
                arrived = tl.atomic_add(counters_ptr + first, 1, sem="acq_rel", scope="gpu")
                if arrived == splits - 1:
                    tl.debug_barrier()
                    tl.store(counters_ptr + first, 0)
                    left = tl.minimum(tokens * group - tile * block_m, block_m)
                    for r0 in range(0, left, merge_rows):
                        r = r0 + tl.arange(0, merge_rows)
                        here = r < left
                        r_top = tl.full([merge_rows], float("-inf"), tl.float32)
                        r_total = tl.zeros([merge_rows], tl.float32)
                        r_acc = tl.zeros([merge_rows, block_d], tl.float32)
                        for j0 in range(0, splits, merge_splits):
                            j = j0 + tl.arange(0, merge_splits)
                            at = (first + j * kv_heads).to(tl.int64)[:, None] * kept_rows + r[None, :]
                            was_kept = (j < splits)[:, None] & here[None, :]
                            j_top = tl.load(
                                stats_ptr + at * 2, mask=was_kept, other=float("-inf"), cache_modifier=".cg"
                            )
                            j_total = tl.load(
                                stats_ptr + at * 2 + 1, mask=was_kept, other=0.0, cache_modifier=".cg"
                            )
                            j_acc = tl.load(
                                partial_ptr + at[:, :, None] * block_d + d[None, None, :],
                                mask=was_kept[:, :, None],
                                other=0.0,
                                cache_modifier=".cg",
                            )
                            new_top = tl.maximum(r_top, tl.max(j_top, 0))
                            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
                            r_fade = tl.exp2(r_top - shift)
                            j_fade = tl.exp2(j_top - shift[None, :])
                            r_total = r_total * r_fade + tl.sum(j_total * j_fade, 0)
                            r_acc = r_acc * r_fade[:, None] + tl.sum(j_acc * j_fade[:, :, None], 0)
                            r_top = new_top
                        r_rows = tile * block_m + r
                        _write(
                            out_ptr,
                            gate_ptr,
                            r_acc / r_total[:, None],
                            (row_begin + r_rows // group).to(tl.int64),
                            kv_head * group + r_rows % group,
                            d,
                            here[:, None] & (d < dim)[None, :],
                            out_token_stride,
                            out_head_stride,
                            gate_token_stride,
                            gate_head_stride,
                            gated,
                        )


class Workspace(NamedTuple):
    """Where the splits of a tile meet. `partial` and `stats`, fp32, may hold anything; `counters`, int32, are
    zero between launches."""

    partial: Tensor
    stats: Tensor
    counters: Tensor

    @classmethod
    def of(cls, floats: int, device: torch.device | str) -> Workspace:
        """Room for `floats` numbers of partial sums, of rows no shorter than LEAST_DOT."""
        rows = -(-floats // LEAST_DOT)
        return cls(
            torch.empty(floats, dtype=torch.float32, device=device),
            torch.empty(2 * rows, dtype=torch.float32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
        )


def most_units(spans: int, tokens: int, group: int, kv_heads: int, rows: int, wave: int) -> int:
    """No fewer than the units, over all KV heads, of `spans` spans with `tokens` tokens together.

    A span of t tiles has at most wave / (t · kv_heads) + 1 splits."""
    return kv_heads * (tokens * group // rows + spans) + spans * wave


def kept_floats(
    spans: int, group: int, dim: int, kv_heads: int, rows: int, wave: int, *, decode: bool
) -> int:
    """Numbers of partial sums that `spans` spans may leave. Only a span whose tiles are fewer than `wave` is
    split, so its units are fewer than 2 · wave; a decode row has one tile a KV head."""
    width = max(LEAST_DOT, triton.next_power_of_2(dim))
    if decode:
        return spans * (wave + kv_heads * -(-group // rows)) * min(group, rows) * width
    return spans * 2 * wave * rows * width


def attend_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    q_indptr: Tensor,
    kv_lens: Tensor,
    page_ids: Tensor,
    page_indptr: Tensor,
    scale: float,
    tiles: Tiles,
    workspace: Workspace,
    *,
    wave: int,
    programs: int,
    out: Tensor,
    gate: Tensor | None = None,
    decode: bool = False,
) -> None:
    """Causal attention of N spans, each over its own pages; their rows of `out` are written, no others.

    q: [T, heads, dim + extra]; k, v: views [pages, page_size, kv_heads, dim] with equal strides and a dense
    last dimension. v None: values are the keys' first `dim` numbers, behind which keys have `extra` more.
    q_indptr [N + 1], page_indptr [N + 1], kv_lens [N], page_ids: int32; the offsets may begin anywhere.
    out: [T, heads, dim]; gate: [T, heads, dim], whose sigmoid multiplies the result.
    `wave`: into how many units a span alone is cut at most. `programs`: the launch; fewer than units loop.
    `decode`: every span is one token. The workspace has room for `kept_floats`.

    Products in q's dtype with fp32 sums (fp32: IEEE), softmax in fp32. KV of another dtype is converted.
    """
    heads, dim = out.shape[1:]
    _, page_size, kv_heads, key_dim = k.shape
    extra = key_dim - dim
    group = heads // kv_heads
    v = k if v is None else v
    assert q.shape[1:] == (heads, key_dim) and heads == group * kv_heads
    assert q.stride(2) == k.stride(3) == v.stride(3) == out.stride(2) == 1
    assert k.stride() == v.stride() and (extra == 0 or v is k)
    assert gate is None or gate.stride(2) == 1
    gated = gate is not None
    gate = out if gate is None else gate
    block_m = tiles.rows
    block_d = max(LEAST_DOT, triton.next_power_of_2(dim))
    kept_rows = min(group, block_m) if decode else block_m
    merge_rows = min(MERGE_ROWS, triton.next_power_of_2(kept_rows))
    merge_splits = max(1, MERGE_NUMBERS * 32 * tiles.warps // (merge_rows * block_d))
    overlap = overlaps(q.device)
    _paged_attention[(programs,)](
        q,
        k,
        v,
        gate,
        out,
        q_indptr,
        kv_lens,
        page_ids,
        page_indptr,
        *workspace,
        len(kv_lens),
        scale * LOG2_E,
        wave,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        gate.stride(0),
        gate.stride(1),
        k.stride(0),
        k.stride(1),
        k.stride(2),
        kv_heads=kv_heads,
        group=group,
        dim=dim,
        extra_dim=extra,
        page_size=page_size,
        max_spans=max(SPANS, triton.next_power_of_2(len(kv_lens))),
        block_m=block_m,
        kept_rows=kept_rows,
        block_n=tiles.keys,
        block_d=block_d,
        block_extra=max(LEAST_DOT, triton.next_power_of_2(extra)) if extra else LEAST_DOT,
        least_split=tiles.least_split,
        split_step=SPLIT_STEP,
        merge_rows=merge_rows,
        merge_splits=merge_splits,
        shared=v is k,
        gated=gated,
        precision="ieee" if q.dtype == torch.float32 else "tf32",
        overlap=overlap,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **({"launch_pdl": True} if overlap else {}),
    )
