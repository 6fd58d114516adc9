"""Prefill of the delta rules by chunks beside peers and floors.

Owns the inputs of these measurements. A sequence begins from a state and leaves one: Denim's in a slot, a
peer's in tensors of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bench.rules import peers
from bench.rules.clock import Floors, sets_of
from bench.rules.delta_decode import DIM, HEADS
from bench.rules.measure import measured
from bench.rules.tables import Row, prompt_shape
from denim.recurrence.backend import FLASHINFER, FLASHQLA
from denim.recurrence.backends import gated_delta_by
from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.kernels.gated_delta_chunks import gated_delta_chunks

LENGTHS = (
    (512, 1),
    (2048, 1),
    (4096, 1),
    (8192, 1),
    (32768, 1),
    (2048, 16),
)  # tokens of a sequence, sequences
CHUNK = 64
MOST_SETS = 8


class Prompt(NamedTuple):
    """Inputs of the rule, `sets` of them, T tokens each in `sequences` of equal length.

    rows: [sets, T, (2 Hk + Hv) d] = [q | k | v], q and k of length 1; a, b: [sets, T, Hv], before the gates;
    log_decay, beta: the gates [sets, T, Hv] fp32; states: [sets * sequences, Hv, d, d].
    """

    key_heads: int
    value_heads: int
    sequences: int
    rows: Tensor
    a: Tensor
    b: Tensor
    a_log: Tensor
    dt_bias: Tensor
    log_decay: Tensor
    beta: Tensor
    states: Tensor

    @property
    def tokens(self) -> int:
        return self.rows.shape[1]

    def split(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [sets, T, H, d], each dense."""
        keys = self.key_heads * DIM
        parts = self.rows.split((keys, keys, self.value_heads * DIM), dim=-1)
        q, k, v = (part.unflatten(-1, (-1, DIM)).contiguous() for part in parts)
        return q, k, v

    def table(self, i: int, size: int) -> ChunkTable:
        """Chunks of set i, each sequence from and to its own slot."""
        each = self.tokens // self.sequences
        slots = list(range(i * self.sequences, (i + 1) * self.sequences))
        return ChunkTable.of(range(0, self.tokens + 1, each), slots, slots, size, "cuda")


def prompt_of(tokens: int, sequences: int, key_heads: int, value_heads: int) -> Prompt:
    """Random inputs on the GPU; as many sets as the cache cannot hold, at most MOST_SETS."""
    total, place = tokens * sequences, {"dtype": torch.bfloat16, "device": "cuda"}
    channels = (2 * key_heads + value_heads) * DIM
    sets = min(MOST_SETS, sets_of(total * channels * 2))
    rows = torch.randn(sets, total, channels, **place)
    unit = rows[..., : 2 * key_heads * DIM].view(sets, total, 2 * key_heads, DIM)
    unit.copy_(torch.nn.functional.normalize(unit.float(), dim=-1))
    a, b = torch.randn(2, sets, total, value_heads, **place)
    a_log = torch.empty(value_heads, device="cuda").uniform_(0.5, 4).log_()
    dt_bias = torch.full((value_heads,), -2.0, **place)
    log_decay = -a_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias)
    states = torch.randn(sets * sequences, value_heads, DIM, DIM, device="cuda") * 0.1
    beta = b.float().sigmoid()
    return Prompt(key_heads, value_heads, sequences, rows, a, b, a_log, dt_bias, log_decay, beta, states)


def delta_floor(floors: Floors, tokens: int, sequences: int, key_heads: int, value_heads: int) -> float:
    """Microseconds: q, k, v and o in bf16 and two gates in fp32 moved once, the states read and written; or
    the products of chunks of 64, d_k (6 d_v) for the state and 2 C (3 d_k + 2 d_v) inside a chunk."""
    total = tokens * sequences
    moved = total * ((2 * key_heads + 2 * value_heads) * DIM * 2 + 2 * value_heads * 4)
    moved += 2 * sequences * value_heads * DIM * DIM * 4
    flops = total * value_heads * (6 * DIM * DIM + 2 * CHUNK * (3 * DIM + 2 * DIM))
    return floors.microseconds(moved, flops)


def gated_delta_rows(floors: Floors) -> Iterator[Row]:
    """Denim, fla, FlashQLA, and FlashInfer with and without cutting sequences over the device."""
    for heads in HEADS:
        for tokens, sequences in LENGTHS:
            yield from _gated_delta(floors, prompt_of(tokens, sequences, *heads), tokens)


def _gated_delta(floors: Floors, prompt: Prompt, tokens: int) -> Iterator[Row]:
    section, sequences, value_heads = "GDN prefill, µs", prompt.sequences, prompt.value_heads
    floor = delta_floor(floors, tokens, sequences, prompt.key_heads, value_heads)
    shape = f"{prompt.key_heads}/{value_heads} heads, {prompt_shape(tokens, sequences)}"
    sets = len(prompt.rows)
    tables = [prompt.table(i, CHUNK) for i in range(sets)]

    def row(name: str, work: Callable[[int], object]) -> Row:
        return measured(section, shape, name, work, sets, floor)

    def denim(i: int) -> Tensor:
        return gated_delta_chunks(
            prompt.rows[i],
            prompt.b[i],
            prompt.a[i],
            prompt.a_log,
            prompt.dt_bias,
            tables[i],
            prompt.states,
            prompt.key_heads,
        )

    yield Row(section, shape, "floor", floor)
    yield row("Denim", denim)
    each = (sequences, tokens)
    q, k, v = prompt.split()
    gates = (prompt.log_decay, prompt.beta)
    states = prompt.states.view(sets, sequences, value_heads, DIM, DIM)
    yield row(
        "fla",
        lambda i: peers.fla_delta_prefill(
            *(x[i].unflatten(0, each) for x in (q, k, v, *gates)), states[i], None
        )[0],
    )
    cu_seqlens = torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * tokens
    yield row(
        "FlashQLA",
        lambda i: peers.flashqla_delta_prefill(
            *(x[i].unsqueeze(0) for x in (q, k, v, *gates)), states[i], cu_seqlens
        )[0],
    )
    alpha = prompt.log_decay.exp()
    for name, split in (("FlashInfer", "auto"), ("FlashInfer, uncut", False)):
        run = partial(_flashinfer, (q, k, v, alpha, prompt.beta), states, cu_seqlens, tokens, split)
        yield row(name, run)

    # As `short_conv_chunks` leaves them for a peer: q of all tokens, then k, then v.
    parts = [torch.cat([x[i].flatten() for x in (q, k, v)]) for i in range(sets)]
    for name, peer in (("via FlashInfer", FLASHINFER), ("via FlashQLA", FLASHQLA)):
        yield row(name, partial(_by_peer, gated_delta_by(peer), prompt, parts, tables))


def _by_peer(
    run: Callable[..., Tensor], prompt: Prompt, parts: list[Tensor], tables: list[ChunkTable], i: int
) -> Tensor:
    """As the engine runs a peer: gates made, states out of their slots and back."""
    gates = (prompt.b[i], prompt.a[i], prompt.a_log, prompt.dt_bias)
    return run(parts[i], *gates, tables[i], prompt.states, prompt.key_heads)


def _flashinfer(
    inputs: tuple[Tensor, ...], states: Tensor, cu_seqlens: Tensor, longest: int, split: str | bool, i: int
) -> Tensor:
    rows = (x[i] for x in inputs)
    return peers.flashinfer_delta_prefill(*rows, states[i], cu_seqlens, longest, split)[0]
