"""SSD (Mamba2), lightning attention and the selective scan (Mamba1): decode and prefill beside peers.

Owns the inputs of these measurements, in the dimensions of published models. States are fp32; a sequence or
row has a slot of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.rules import peers
from bench.rules.clock import Floors, in_place_multiply, sets_of
from bench.rules.delta_decode import BATCHES, WIDTH
from bench.rules.delta_prefill import LENGTHS, MOST_SETS
from bench.rules.measure import measured
from bench.rules.tables import Row, prompt_shape
from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.kernels.accumulation_chunks import TimeStep, accumulation_chunks, chunk_tokens
from denim.recurrence.kernels.lightning_step import lightning_step
from denim.recurrence.kernels.selective_scan_chunks import CHUNK_TOKENS, selective_scan_chunks
from denim.recurrence.kernels.selective_scan_step import selective_scan_step_fused
from denim.recurrence.kernels.ssd_step import ssd_step_fused

SSD_HEADS, SSD_DIM, SSD_STATE = 128, 64, 128  # Granite-4.0-H-Small; one group
LIGHTNING_HEADS, LIGHTNING_DIM = 64, 128  # MiniMax-Text-01
SCAN_CHANNELS, SCAN_STATE = 8192, 16  # Jamba
FLOOR_CHUNK = 64  # of the floors' FLOPs
# The scan forms one for each token, channel and state: 16 a clock on each of an H200's 132 multiprocessors.
EXPONENTIALS_PER_SECOND = 132 * 16 * 1.98e9
BF16: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}


def decode_rows(floors: Floors) -> Iterator[Row]:
    """One token a row of each rule, every batch."""
    for batch in BATCHES:
        yield from _ssd_decode(floors, batch)
    for batch in BATCHES:
        yield from _lightning_decode(floors, batch)
    for batch in BATCHES:
        yield from _scan_decode(floors, batch)


def prefill_rows(floors: Floors) -> Iterator[Row]:
    """Whole sequences of each rule, every length."""
    for tokens, sequences in LENGTHS:
        yield from _ssd_prefill(floors, tokens, sequences)
    for tokens, sequences in LENGTHS:
        yield from _lightning_prefill(floors, tokens, sequences)
    for tokens, sequences in LENGTHS:
        yield from _scan_prefill(floors, tokens, sequences)


def _ssd_decode(floors: Floors, batch: int) -> Iterator[Row]:
    section, inner, channels = "SSD decode, µs", SSD_HEADS * SSD_DIM, SSD_HEADS * SSD_DIM + 2 * SSD_STATE
    state_bytes = batch * SSD_HEADS * SSD_DIM * SSD_STATE * 4
    sets, floor, shape = sets_of(state_bytes), floors.microseconds(2 * state_bytes), f"batch {batch}"
    projected = torch.randn(sets, batch, inner + channels + SSD_HEADS, **BF16)
    state = torch.randn(sets * batch, SSD_HEADS, SSD_DIM, SSD_STATE, device="cuda")
    window = torch.randn(sets * batch, WIDTH - 1, channels, **BF16)
    slots = torch.randperm(sets * batch, device="cuda").view(sets, batch)
    weight = torch.randn(channels, WIDTH, **BF16) * 0.5
    a_log, d, dt_bias = torch.rand(3, SSD_HEADS, device="cuda")
    scale = torch.ones(inner, device="cuda")
    yield Row(section, shape, "floor", floor)
    yield Row(section, shape, "x *= 1", in_place_multiply(state, batch, sets), floor)

    def denim(i: int) -> Tensor:
        fixed = (weight, None, a_log, d, dt_bias, scale, 1e-5, 1, False)
        return ssd_step_fused(projected[i], *fixed, slots[i], window, state, 1)

    yield measured(section, shape, "fused step", denim, sets, floor)
    parts = projected.split((inner, inner, SSD_STATE, SSD_STATE, SSD_HEADS), dim=-1)
    z, x, b, c, dt = (part.contiguous() for part in parts)
    x = x.unflatten(-1, (SSD_HEADS, SSD_DIM))
    dt = dt.unsqueeze(-1).expand(-1, -1, -1, SSD_DIM)
    per_channel = (SSD_HEADS, SSD_DIM)
    a = (-a_log.exp()).view(-1, 1, 1).expand(*per_channel, SSD_STATE)
    skip, bias = (t.unsqueeze(-1).expand(per_channel) for t in (d, dt_bias))
    short = slots.int()

    def rule(i: int) -> Tensor:
        rows = (x[i], dt[i], a, b[i].unsqueeze(1), c[i].unsqueeze(1), skip, bias)
        return peers.mamba_step(state, *rows, None, short[i])

    yield measured(section, shape, "mamba-ssm, rule", rule, sets, floor)
    windows = torch.randn(sets, batch, channels, WIDTH, **BF16)

    def three_kernels(i: int) -> Tensor:
        peers.fla_convolution_step(projected[i, :, inner : inner + channels], windows[i], weight)
        return peers.mamba_gated_norm(rule(i).flatten(1), z[i], scale)

    yield measured(section, shape, "mamba-ssm, 3 kernels", three_kernels, sets, floor)


def _lightning_decode(floors: Floors, batch: int) -> Iterator[Row]:
    section, heads, dim = "lightning decode, µs", LIGHTNING_HEADS, LIGHTNING_DIM
    state_bytes = batch * heads * dim * dim * 4
    sets, floor, shape = sets_of(state_bytes), floors.microseconds(2 * state_bytes), f"batch {batch}"
    projected = torch.randn(sets, batch, 3 * heads * dim, **BF16)
    state = torch.randn(sets * batch, heads, dim, dim, device="cuda")
    slots = torch.randperm(sets * batch, device="cuda").view(sets, batch)
    log_decay = -torch.rand(heads, device="cuda")
    yield Row(section, shape, "floor", floor)
    yield Row(section, shape, "x *= 1", in_place_multiply(state, batch, sets), floor)
    yield measured(
        section,
        shape,
        "rule",
        lambda i: lightning_step(projected[i], log_decay, slots[i], state),
        sets,
        floor,
    )
    q, k, v = projected.view(sets, batch, 1, heads, 3, dim).unbind(4)
    q, k, v = (x.contiguous() for x in (q, k, v))
    states = state.view(sets, batch, heads, dim, dim)

    def fla(i: int) -> Tensor:
        return peers.fla_accumulation_step(q[i], k[i], v[i], log_decay, states[i])[0]

    yield measured(section, shape, "fla", fla, sets, floor)


def _scan_decode(floors: Floors, batch: int) -> Iterator[Row]:
    section, channels = "selective scan decode, µs", SCAN_CHANNELS
    state_bytes = batch * channels * SCAN_STATE * 4
    sets, shape = sets_of(state_bytes), f"batch {batch}"
    weights = channels * (SCAN_STATE + 2) * 4
    floor = floors.microseconds(2 * state_bytes + weights + 4 * batch * channels * 2)
    x, dt, z = torch.randn(3, sets, batch, channels, **BF16)
    bc = torch.randn(sets, batch, 2 * SCAN_STATE, **BF16)
    dt_bias, d = torch.rand(2, channels, device="cuda")
    a_log = torch.rand(channels, SCAN_STATE, device="cuda")
    state = torch.randn(sets * batch, channels, SCAN_STATE, device="cuda")
    slots = torch.randperm(sets * batch, device="cuda").view(sets, batch)
    yield Row(section, shape, "floor", floor)
    yield Row(section, shape, "x *= 1", in_place_multiply(state, batch, sets), floor)

    def denim(i: int) -> Tensor:
        fixed = (dt_bias, a_log, d, bc[i], None, None, None)
        return selective_scan_step_fused(x[i], dt[i], *fixed, z[i], slots[i], state)

    yield measured(section, shape, "fused step", denim, sets, floor)
    a, short = -a_log.exp(), slots.int()
    b, c = (part.contiguous() for part in bc.chunk(2, -1))

    def mamba(i: int) -> Tensor:
        return peers.mamba_step(state, x[i], dt[i], a, b[i], c[i], d, dt_bias, z[i], short[i])

    yield measured(section, shape, "mamba-ssm", mamba, sets, floor)


def _ssd_prefill(floors: Floors, tokens: int, sequences: int) -> Iterator[Row]:
    section, total = "SSD prefill, µs", tokens * sequences
    inner, shape = SSD_HEADS * SSD_DIM, prompt_shape(tokens, sequences)
    moved = total * (2 * inner + 2 * SSD_STATE + SSD_HEADS) * 2
    moved += 2 * sequences * inner * SSD_STATE * 4
    inside = 2 * FLOOR_CHUNK * (SSD_STATE + inner)
    floor = floors.microseconds(moved, total * (4 * inner * SSD_STATE + inside))
    sets = min(MOST_SETS, sets_of(total * inner * 2))
    x = torch.randn(sets, total, SSD_HEADS, SSD_DIM, **BF16)
    b, c = torch.randn(2, sets, total, 1, SSD_STATE, **BF16)
    dt = torch.randn(sets, total, SSD_HEADS, **BF16)
    a_log, d, dt_bias = torch.rand(3, SSD_HEADS, device="cuda")
    states = torch.randn(sets * sequences, SSD_HEADS, SSD_DIM, SSD_STATE, device="cuda")
    chunks = tables(tokens, sequences, sets, chunk_tokens(x.dtype))
    yield Row(section, shape, "floor", floor)

    def denim(i: int) -> Tensor:
        step = TimeStep(dt[i], dt_bias, (0.0, float("inf")))
        return accumulation_chunks(c[i], b[i], x[i], a_log, chunks[i], states, time_step=step, skip=d)

    yield measured(section, shape, "Denim", denim, sets, floor)
    each, a = (sequences, tokens), -a_log.exp()
    begin = states.view(sets, sequences, SSD_HEADS, SSD_DIM, SSD_STATE)

    def mamba(i: int) -> Tensor:
        rows = (t[i].unflatten(0, each) for t in (x, dt))
        return peers.mamba_prefill(
            *rows, a, b[i].unflatten(0, each), c[i].unflatten(0, each), d, dt_bias, begin[i]
        )[0]

    yield measured(section, shape, "mamba-ssm", mamba, sets, floor)


def _lightning_prefill(floors: Floors, tokens: int, sequences: int) -> Iterator[Row]:
    section, heads, dim = "lightning prefill, µs", LIGHTNING_HEADS, LIGHTNING_DIM
    total, shape = tokens * sequences, prompt_shape(tokens, sequences)
    moved = total * 4 * heads * dim * 2 + 2 * sequences * heads * dim * dim * 4
    floor = floors.microseconds(moved, total * heads * (4 * dim * dim + 2 * FLOOR_CHUNK * 2 * dim))
    sets = min(MOST_SETS, sets_of(total * heads * dim * 6))
    q, k, v = torch.randn(3, sets, total, heads, dim, **BF16)
    log_decay = -torch.rand(heads, device="cuda")
    states = torch.randn(sets * sequences, heads, dim, dim, device="cuda")
    chunks = tables(tokens, sequences, sets, chunk_tokens(q.dtype))
    yield Row(section, shape, "floor", floor)

    def denim(i: int) -> Tensor:
        return accumulation_chunks(q[i], k[i], v[i], log_decay, chunks[i], states)

    yield measured(section, shape, "Denim", denim, sets, floor)
    begin = states.view(sets, sequences, heads, dim, dim)

    def fla(i: int) -> Tensor:
        rows = (t[i].unflatten(0, (sequences, tokens)) for t in (q, k, v))
        return peers.fla_accumulation_prefill(*rows, log_decay, begin[i])[0]

    yield measured(section, shape, "fla", fla, sets, floor)


def _scan_prefill(floors: Floors, tokens: int, sequences: int) -> Iterator[Row]:
    section, channels = "selective scan prefill, µs", SCAN_CHANNELS
    total, shape = tokens * sequences, prompt_shape(tokens, sequences)
    moved = total * (4 * channels + 2 * SCAN_STATE) * 2 + 2 * sequences * channels * SCAN_STATE * 4
    sets = min(MOST_SETS, sets_of(total * channels * 6))
    x, dt, z = torch.randn(3, sets, total, channels, **BF16)
    bc = torch.randn(sets, total, 2 * SCAN_STATE, **BF16)
    dt_bias, d = torch.rand(2, channels, device="cuda")
    a_log = torch.rand(channels, SCAN_STATE, device="cuda")
    states = torch.randn(sets * sequences, channels, SCAN_STATE, device="cuda")
    chunks = tables(tokens, sequences, sets, CHUNK_TOKENS)
    exponentials = total * channels * SCAN_STATE / EXPONENTIALS_PER_SECOND * 1e6
    floor = max(floors.microseconds(moved), exponentials)
    yield Row(section, shape, "floor", floor)

    def denim(i: int) -> Tensor:
        fixed = (dt_bias, a_log, d, bc[i], None, None, None)
        return selective_scan_chunks(x[i], dt[i], *fixed, z[i], chunks[i], states)

    yield measured(section, shape, "Denim", denim, sets, floor)
    # The peer has channels before tokens; any random numbers do.
    px, pdt, pz = (t.view(sets, sequences, channels, tokens) for t in (x, dt, z))
    b, c = bc.view(2, sets, sequences, 1, SCAN_STATE, tokens)
    a = -a_log.exp()

    def mamba(i: int) -> Tensor:
        return peers.mamba_scan_prefill(px[i], pdt[i], a, b[i], c[i], d, dt_bias, pz[i])

    yield measured(section, shape, "mamba-ssm, no state", mamba, sets, floor)


def tables(tokens: int, sequences: int, sets: int, size: int) -> list[ChunkTable]:
    """One for each set; every sequence from and to a slot of its own."""
    offsets = range(0, tokens * sequences + 1, tokens)
    slots = [list(range(i * sequences, (i + 1) * sequences)) for i in range(sets)]
    return [ChunkTable.of(offsets, at, at, size, "cuda") for at in slots]
