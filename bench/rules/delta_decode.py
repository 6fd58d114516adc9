"""Decode of the delta rules, one token a row: the rule alone and the fused step, beside peers and floors.

Owns the inputs of these measurements. States are fp32 and lie in an arena's slots, in an order that is no
order; what a peer needs otherwise it gets: dense states, one behind the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from bench.rules import peers
from bench.rules.clock import Floors, in_place_multiply, sets_of
from bench.rules.measure import measured
from bench.rules.slot_multiply import slot_multiply
from bench.rules.tables import Row
from denim.recurrence.arrivals import new_arrivals
from denim.recurrence.deferred import Ring
from denim.recurrence.kernels.delta_inputs import DeltaInputs
from denim.recurrence.kernels.delta_rule_step import delta_rule_step
from denim.recurrence.kernels.fused_delta_step import fused_delta_step

DIM = 128  # of keys and values
WIDTH = 4  # of the convolution
NORM_EPS = 1e-6
HEADS = ((16, 16), (16, 32))  # key and value heads: Qwen3.5-0.8B, Qwen3.5-4B to 35B
BATCHES = (1, 2, 4, 8, 64, 256)


class Step(NamedTuple):
    """Inputs of one step of a layer, `sets` of them; a set has B rows.

    projected: [sets, B, channels + Hv·d_v + 2·Hv] = [q | k | v | z | b | a]; slots: [sets, B]; state: [slots,
    Hv, d, d]; window: [slots, W - 1, channels]; arrivals: a layer's counters, for
    each set its own, since a step may begin before the end of the one before it; the rest is weights.
    """

    key_heads: int
    value_heads: int
    projected: Tensor
    slots: Tensor
    state: Tensor
    window: Tensor
    taps: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    arrivals: list[Tensor]

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.value_heads) * DIM

    @property
    def sets(self) -> int:
        return len(self.projected)

    @property
    def batch(self) -> int:
        return self.projected.shape[1]

    def split(self) -> tuple[Tensor, ...]:
        """q, k [sets, B, 1, Hk, d], v, z [sets, B, 1, Hv, d], b, a [sets, B, 1, Hv], all dense."""
        values = self.value_heads * DIM
        parts = self.projected.split(
            (self.key_heads * DIM, self.key_heads * DIM, values, values, self.value_heads, self.value_heads),
            dim=-1,
        )
        heads = [part.unflatten(-1, (-1, DIM)) for part in parts[:4]]
        return tuple(part.unsqueeze(2).contiguous() for part in (*heads, *parts[4:]))


def step_of(key_heads: int, value_heads: int, batch: int) -> Step:
    """Random inputs on the GPU; as many sets as the cache cannot hold."""
    sets = sets_of(state_bytes(value_heads, batch))
    place = {"dtype": torch.bfloat16, "device": "cuda"}
    channels, values = (2 * key_heads + value_heads) * DIM, value_heads * DIM
    return Step(
        key_heads,
        value_heads,
        torch.randn(sets, batch, channels + values + 2 * value_heads, **place),
        torch.randperm(sets * batch, device="cuda").view(sets, batch),
        torch.randn(sets * batch, value_heads, DIM, DIM, device="cuda") * 0.1,
        torch.randn(sets * batch, WIDTH - 1, channels, **place),
        torch.randn(WIDTH, channels, **place) * 0.5,
        torch.empty(value_heads, device="cuda").uniform_(1, 16).log_(),
        torch.ones(value_heads, **place),
        torch.ones(DIM, device="cuda"),
        [new_arrivals(key_heads, value_heads, "cuda") for _ in range(sets)],
    )


def state_bytes(value_heads: int, batch: int) -> int:
    """Of `batch` states in fp32."""
    return batch * value_heads * DIM * DIM * 4


def fused(step: Step, i: int, ring: Ring | None = None, pending: Tensor | None = None) -> Tensor:
    """Denim's whole step on set i."""
    values, heads = step.value_heads * DIM, step.value_heads
    rows = step.projected[i].split((step.channels, values, heads, heads), dim=1)
    weights = (step.taps, step.a_log, step.dt_bias, step.norm, NORM_EPS)
    inputs = DeltaInputs(*rows, *weights, step.slots[i], step.window, step.state)
    return fused_delta_step(inputs, step.arrivals[i], ring, pending)


def gated_delta_rows(floors: Floors) -> Iterator[Row]:
    """Floors, Denim's rule and step, fla's rule in both manners, and fla's three kernels of a step."""
    for key_heads, value_heads in HEADS:
        for batch in BATCHES:
            yield from _gated_delta(floors, step_of(key_heads, value_heads, batch))


def _gated_delta(floors: Floors, step: Step) -> Iterator[Row]:
    batch, value_heads = step.batch, step.value_heads
    floor = floors.microseconds(2 * state_bytes(value_heads, batch))
    shape = f"{step.key_heads}/{value_heads} heads, batch {batch}"

    def row(name: str, work: Callable[[int], object], sets: int = step.sets) -> Row:
        return measured("GDN decode, µs", shape, name, work, sets, floor)

    yield Row("GDN decode, µs", shape, "floor", floor)
    multiply = in_place_multiply(step.state, batch, step.sets)
    yield Row("GDN decode, µs", shape, "x *= 1", multiply, floor)
    yield Row("GDN decode, µs", shape, "x *= 1 at slots", slot_multiply(step.state, step.slots), floor)
    q, k, v, z, b, a = step.split()
    unit_q, unit_k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    log_decay = -torch.rand(b.shape, device="cuda")
    beta = torch.rand(b.shape, device="cuda")
    yield row(
        "rule",
        lambda i: delta_rule_step(
            unit_q[i, :, 0],
            unit_k[i, :, 0],
            v[i, :, 0],
            log_decay[i, :, 0],
            beta[i, :, 0],
            step.slots[i],
            step.state,
        ),
    )
    yield row("fused step", lambda i: fused(step, i))
    states = step.state.view(step.sets, batch, value_heads, DIM, DIM)
    windows = step.window.view(step.sets, batch, -1, WIDTH - 1)
    windows = torch.nn.functional.pad(windows, (1, 0)).contiguous()
    convolution = step.taps.t().contiguous()

    def fla(i: int) -> Tensor:
        return peers.fla_delta_step(q[i], k[i], v[i], a[i], b[i], step.a_log, step.dt_bias, states[i])[0]

    yield row("fla, gates fused", fla)
    short = [slots.int() for slots in step.slots]  # each for itself: it wants them aligned to 16 bytes
    wide_bias = step.dt_bias.float()

    def flashinfer(i: int) -> Tensor:
        gates = (a[i], b[i], step.a_log, wide_bias)
        return peers.flashinfer_delta_step(q[i], k[i], v[i], *gates, step.state, short[i])

    yield row("FlashInfer (slots)", flashinfer)
    yield row(
        "fla of transformers",
        lambda i: peers.fla_delta_step_of_transformers(q[i], k[i], v[i], log_decay[i], beta[i], states[i]),
    )

    def three_kernels(i: int) -> Tensor:
        peers.fla_convolution_step(step.projected[i, :, : step.channels], windows[i], convolution)
        out = fla(i)
        return peers.fla_gated_norm(out.view(-1, DIM), z[i].view(-1, DIM), step.norm)

    yield row("fla, 3 kernels", three_kernels)
