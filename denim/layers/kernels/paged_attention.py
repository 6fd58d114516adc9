"""Softmax attention over paged KV: one kernel for decode rows and for segments, flash-style.

Owns the kernel and its tiles. Flash attention: Dao 2023 (arXiv 2307.08691); keys split over programs:
Flash-Decoding (Dao et al. 2023). How work is cut: `denim.layers.kernels.split_keys`.

The query heads that share a KV head are rows of one tile, so that a tile of 16 rows is 16 / group tokens.
Every program computes from `q_indptr` and `kv_lens` alone which units are its own: nothing is planned, and a
captured graph may be replayed with other lengths.

Keys behind a span's length are never used, whatever lies there: scores are masked, values are not loaded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from denim.layers.kernels.split_keys import LEAST_DOT, Cut, Workspace, cdiv, split_of
from denim.recurrence.kernels.exponentials import LOG2_E
from denim.recurrence.kernels.overlap import launch_options, overlaps

MERGE_ROWS = 16  # rows whose partial sums are added up at one time
MERGE_NUMBERS = 64  # of partial sums in registers of one thread meanwhile
MERGE_SPLITS = 8  # whose loads are on their way at one time: enough to hide them, and each is code of its own
SPANS = 256  # spans that a program looks at together; more are a variant of the kernel for each power of two


class Tiles(NamedTuple):
    """Shape of a unit's work: query rows (token, head of the group) and keys of one block; warps and pipeline
    stages of a program."""

    rows: int
    keys: int
    warps: int
    stages: int


@triton.jit
def _attend_block(
    queries,
    state,
    pages,
    start,
    end,
    limit,
    scale,
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
    """Keys start .. start + block_n: running maximum, sum and weighted values go on.

    `masked`: keys from `end` on do not exist, and row r sees keys below limit[r] only. The state holds the
    block's pages, and then the next block's: loaded a block ahead, they do not stand in the way of the loads
    of keys and values."""
    q, q_extra = queries
    top, total, acc, page = state
    k_ptr, v_ptr, page_ids_ptr, page_stride, token_stride = pages
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
    output, gates, result, token, head, mask, dim: tl.constexpr, block_d: tl.constexpr, gated: tl.constexpr
):
    """Rows of the result, whose token and head are given."""
    out_ptr, out_token_stride, out_head_stride = output
    gate_ptr, gate_token_stride, gate_head_stride = gates
    d = tl.arange(0, block_d)
    mask = mask[:, None] & (d < dim)[None, :]
    if gated:
        gate_at = token[:, None] * gate_token_stride + head[:, None] * gate_head_stride + d[None, :]
        result = result * tl.sigmoid(tl.load(gate_ptr + gate_at, mask=mask, other=0.0).to(tl.float32))
    out_at = token[:, None] * out_token_stride + head[:, None] * out_head_stride + d[None, :]
    tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _merged(
    workspace,
    first,
    splits,
    r,
    here,
    kv_heads: tl.constexpr,
    kept_rows: tl.constexpr,
    merge_rows: tl.constexpr,
    merge_splits: tl.constexpr,
    block_d: tl.constexpr,
):
    """Rows r of a tile, added up over its splits."""
    partial_ptr, stats_ptr = workspace
    d = tl.arange(0, block_d)
    top = tl.full([merge_rows], float("-inf"), tl.float32)
    total = tl.zeros([merge_rows], tl.float32)
    acc = tl.zeros([merge_rows, block_d], tl.float32)
    for j0 in range(0, splits, merge_splits):
        for j in tl.static_range(merge_splits):
            at = (first + (j0 + j) * kv_heads).to(tl.int64) * kept_rows + r
            kept = here & (j0 + j < splits)
            j_top = tl.load(stats_ptr + at * 2, mask=kept, other=float("-inf"), cache_modifier=".cg")
            j_total = tl.load(stats_ptr + at * 2 + 1, mask=kept, other=0.0, cache_modifier=".cg")
            j_acc = tl.load(
                partial_ptr + at[:, None] * block_d + d[None, :],
                mask=kept[:, None],
                other=0.0,
                cache_modifier=".cg",
            )
            new_top = tl.maximum(top, j_top)
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen no key yet
            fade = tl.exp2(top - shift)
            j_fade = tl.exp2(j_top - shift)
            total = total * fade + j_total * j_fade
            acc = acc * fade[:, None] + j_acc * j_fade[:, None]
            top = new_top
    return acc / total[:, None]


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
    most_split: tl.constexpr,
    merge_rows: tl.constexpr,
    merge_splits: tl.constexpr,
    shared: tl.constexpr,
    decode: tl.constexpr,
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
    tiles = cdiv((q_end - q_begin) * group, block_m)
    if not decode:
        wave = tl.maximum(wave // tl.maximum(tl.sum((kv_len > 0).to(tl.int32), 0), 1), 1)  # of each span
    split = split_of(kv_len, tiles, kv_heads, wave, least_split, most_split)
    splits_of_row = cdiv(kv_len, split)
    units = tiles * splits_of_row
    ends = tl.cumsum(units, 0)
    all_units = tl.sum(units, 0)
    kept = tl.where(splits_of_row > 1, units, 0)  # units with a place in the workspace

    output = (out_ptr, out_token_stride, out_head_stride)
    gates = (gate_ptr, gate_token_stride, gate_head_stride)
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
        row_split = split_of(length, cdiv(tokens * group, block_m), kv_heads, wave, least_split, most_split)
        row_splits = cdiv(length, row_split)
        tile = unit_in_row // row_splits
        which = unit_in_row % row_splits

        rows = tile * block_m + m
        valid = rows < tokens * group
        local = tl.minimum(rows // group, tokens - 1)
        limit = length - tokens + local + 1  # keys that a row sees
        last = tl.minimum((tile * block_m + block_m - 1) // group, tokens - 1)
        visible = length - tokens + last + 1  # keys that the tile sees
        everywhere = length - tokens + tile * block_m // group + 1  # keys that each of its rows sees
        splits = cdiv(visible, row_split)
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
            head_at = kv_head * head_stride
            pages = (k_ptr + head_at, v_ptr + head_at, table_ptr, page_stride, token_stride)
            begin = which * row_split
            end = tl.minimum(begin + row_split, visible)
            middle = begin + tl.maximum(tl.minimum(everywhere, end) - begin, 0) // block_n * block_n

            keys = begin + tl.arange(0, block_n)
            state = (
                tl.full([block_m], float("-inf"), tl.float32),
                tl.zeros([block_m], tl.float32),
                tl.zeros([block_m, block_d], tl.float32),
                tl.load(table_ptr + keys // page_size, mask=keys < end, other=0),
            )
            for start in range(begin, middle, block_n):
                state = _attend_block(
                    (q, q_extra), state, pages, start, end, limit, scale, page_size, dim, extra_dim, block_n,
                    block_d, block_extra, shared, False, precision,
                )  # fmt: skip
            for start in range(middle, end, block_n):
                state = _attend_block(
                    (q, q_extra), state, pages, start, end, limit, scale, page_size, dim, extra_dim, block_n,
                    block_d, block_extra, shared, True, precision,
                )  # fmt: skip
            top, total, acc, _ = state

            if splits == 1:
                _write(output, gates, acc / total[:, None], token, head, valid, dim, block_d, gated)
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
                        result = _merged(
                            (partial_ptr, stats_ptr), first, splits, r, r < left, kv_heads, kept_rows,
                            merge_rows, merge_splits, block_d,
                        )  # fmt: skip
                        r_rows = tile * block_m + r
                        r_token = (row_begin + r_rows // group).to(tl.int64)
                        r_head = kv_head * group + r_rows % group
                        _write(output, gates, result, r_token, r_head, r < left, dim, block_d, gated)


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
    cut: Cut,
    programs: int,
    out: Tensor,
    gate: Tensor | None = None,
    decode: bool = False,
) -> None:
    """Causal attention of N spans, each over its own pages; their rows of `out` are written, no others.

    q: [T, heads, dim + extra]; k, v: views [pages, page_size, kv_heads, dim] with equal strides and a dense
    last dimension. v None: values are the keys' first `dim` numbers, behind which keys have `extra` more.
    q_indptr [N + 1], page_indptr [N + 1], kv_lens [N], page_ids: int32; the offsets may begin anywhere. out:
    [T, heads, dim]; gate: [T, heads, dim], whose sigmoid multiplies the result. `programs`: the launch; fewer
    than units loop. `decode`: every span is one token. The workspace has room for the units that are split.

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
    merge_splits = MERGE_NUMBERS * 32 * tiles.warps // (merge_rows * block_d)
    merge_splits = min(max(merge_splits, 1), MERGE_SPLITS)
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
        scale * LOG2_E.value,
        cut.wave,
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
        least_split=cut.least,
        most_split=cut.most,
        merge_rows=merge_rows,
        merge_splits=merge_splits,
        shared=v is k,
        decode=decode,
        gated=gated,
        precision="ieee" if q.dtype == torch.float32 else "tf32",
        overlap=overlap,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **launch_options(overlap),
    )
