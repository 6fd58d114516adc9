"""KDA, the delta rule with a decay a key channel: decode and prefill beside fla.

Owns what differs from Gated DeltaNet's inputs: the gate's projection, and one number of heads for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bench.rules import peers
from bench.rules.clock import Floors
from bench.rules.delta_decode import BATCHES, DIM, NORM_EPS, Step, state_bytes, step_of
from bench.rules.delta_prefill import CHUNK, LENGTHS, Prompt, delta_floor, prompt_of
from bench.rules.measure import measured
from bench.rules.tables import Row, prompt_shape
from denim.recurrence.deferred import Ring
from denim.recurrence.kernels.delta_inputs import DeltaInputs
from denim.recurrence.kernels.delta_rule_step import delta_rule_step
from denim.recurrence.kernels.fused_delta_step import fused_delta_step
from denim.recurrence.kernels.kimi_delta_chunks import kimi_delta_chunks

KIMI_HEADS = 32  # Kimi Linear


def fused_kimi(step: Step) -> Callable[..., Tensor]:
    """Denim's whole step, of (set, ring or None, records of each row or None)."""
    f, g = torch.randn(2, step.sets, step.batch, KIMI_HEADS * DIM, dtype=torch.bfloat16, device="cuda")
    b = step.split()[4]
    dt_bias = torch.full((KIMI_HEADS * DIM,), -2.0, device="cuda")

    def run(i: int, ring: Ring | None = None, pending: Tensor | None = None) -> Tensor:
        rows = step.projected[i, :, : step.channels], g[i], b[i, :, 0], f[i]
        weights = (step.taps, step.a_log, dt_bias, step.norm, NORM_EPS)
        inputs = DeltaInputs(*rows, *weights, step.slots[i], step.window, step.state)
        return fused_delta_step(inputs, step.arrivals[i], ring, pending)

    return run


def decode_rows(floors: Floors) -> Iterator[Row]:
    """KDA: the rule alone, and fla's. Its fused step has the same state and a few more gates."""
    for batch in BATCHES:
        yield from _decode(floors, step_of(KIMI_HEADS, KIMI_HEADS, batch))


def _decode(floors: Floors, step: Step) -> Iterator[Row]:
    section, batch = "KDA decode, µs", step.batch
    floor = floors.microseconds(2 * state_bytes(KIMI_HEADS, batch))
    shape = f"{KIMI_HEADS} heads, batch {batch}"
    q, k, v, _, b, _ = step.split()
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    log_decay = -torch.rand(*b.shape, DIM, device="cuda")
    beta = torch.rand(b.shape, device="cuda")
    states = step.state.view(step.sets, batch, KIMI_HEADS, DIM, DIM)
    yield Row(section, shape, "floor", floor)
    yield measured(
        section,
        shape,
        "rule",
        lambda i: delta_rule_step(
            q[i, :, 0],
            k[i, :, 0],
            v[i, :, 0],
            log_decay[i, :, 0],
            beta[i, :, 0],
            step.slots[i],
            step.state,
        ),
        step.sets,
        floor,
    )
    yield measured(section, shape, "fused step", fused_kimi(step), step.sets, floor)
    yield measured(
        section,
        shape,
        "fla",
        lambda i: peers.fla_kimi_step(q[i], k[i], v[i], log_decay[i], beta[i], states[i])[0],
        step.sets,
        floor,
    )


def prefill_rows(floors: Floors) -> Iterator[Row]:
    """KDA: Denim and fla."""
    for tokens, sequences in LENGTHS:
        yield from _prefill(floors, prompt_of(tokens, sequences, KIMI_HEADS, KIMI_HEADS), tokens)


def _prefill(floors: Floors, prompt: Prompt, tokens: int) -> Iterator[Row]:
    section, sequences = "KDA prefill, µs", prompt.sequences
    floor = delta_floor(floors, tokens, sequences, KIMI_HEADS, KIMI_HEADS)
    shape = f"{KIMI_HEADS} heads, {prompt_shape(tokens, sequences)}"
    sets = len(prompt.rows)
    f = torch.randn(sets, prompt.tokens, KIMI_HEADS * DIM, dtype=torch.bfloat16, device="cuda")
    dt_bias = torch.full((KIMI_HEADS * DIM,), -2.0, device="cuda")
    tables = [prompt.table(i, CHUNK) for i in range(sets)]
    yield Row(section, shape, "floor", floor)

    def denim(i: int) -> Tensor:
        return kimi_delta_chunks(
            prompt.rows[i], prompt.b[i], f[i], prompt.a_log, dt_bias, tables[i], prompt.states
        )

    yield measured(section, shape, "Denim", denim, sets, floor)
    q, k, v = prompt.split()
    shaped = f.view(sets, prompt.tokens, KIMI_HEADS, DIM).float() + dt_bias.view(KIMI_HEADS, DIM)
    log_decay = -prompt.a_log.exp().unsqueeze(-1) * torch.nn.functional.softplus(shaped)
    del shaped
    states = prompt.states.view(sets, sequences, KIMI_HEADS, DIM, DIM)

    def fla(i: int) -> Tensor:
        packed = (x[i].unflatten(0, (sequences, tokens)) for x in (q, k, v, log_decay, prompt.beta))
        return peers.fla_kimi_prefill(*packed, states[i])[0]

    yield measured(section, shape, "fla", fla, sets, floor)
