"""Inputs on which kernels are compared with float64: random ones, and strong and weak decay, for every rule.

Owns the inputs and the references: Denim's chunked forms in float64, which agree with the recurrences token
by token to 1e-10. Every sequence begins from a state that is not zero.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.rules import peers
from bench.rules.delta_decode import DIM
from bench.rules.delta_prefill import CHUNK, Prompt, prompt_of
from bench.rules.errors import Error, compared
from bench.rules.kimi import KIMI_HEADS
from bench.rules.other_rules import (
    BF16,
    LIGHTNING_DIM,
    LIGHTNING_HEADS,
    SCAN_STATE,
    SSD_DIM,
    SSD_HEADS,
    SSD_STATE,
    tables,
)
from denim.recurrence.gated_accumulation import gated_accumulation_chunked
from denim.recurrence.gated_delta import gated_delta_chunked
from denim.recurrence.kernels.accumulation_chunks import TimeStep, accumulation_chunks, chunk_tokens
from denim.recurrence.kernels.delta_rule_step import delta_rule_step
from denim.recurrence.kernels.gated_delta_chunks import gated_delta_chunks
from denim.recurrence.kernels.kimi_delta_chunks import kimi_delta_chunks
from denim.recurrence.kernels.selective_scan_chunks import CHUNK_TOKENS, selective_scan_chunks
from denim.recurrence.selective_scan import selective_scan_chunked

TOKENS = 2048
WHOLE = [0, TOKENS]
STEPS = 256  # of decode, one behind the other
HEADS = (16, 16)
SCAN_CHANNELS = 512
# What is added before the softplus that decays come from: e^-0.3 or so a token, then e^-20 and e^-0.0005.
SHIFTS = {"random": 0.0, "strong decay": 8.0, "weak decay": -7.0}
# Lightning's decay is a constant of a head: log-decays are spread over 0 .. this.
LIGHTNING_SPREAD = {"random": 1.0, "strong decay": 40.0, "weak decay": 1e-3}


def every_error() -> Iterator[Error]:
    """All rules, all kinds of input, Denim and its peers."""
    for inputs, shift in SHIFTS.items():
        prompt = prompt_of(TOKENS, 1, *HEADS)
        yield from _gated_delta(inputs, _shifted(prompt, shift))
        yield from _kimi(inputs, prompt_of(TOKENS, 1, KIMI_HEADS, KIMI_HEADS), shift)
        yield from _ssd(inputs, shift)
        yield from _lightning(inputs)
        yield from _scan(inputs, shift)


def _gated_delta(inputs: str, prompt: Prompt) -> Iterator[Error]:
    q, k, v = (x[:1] for x in prompt.split())
    gates = (prompt.log_decay[:1], prompt.beta[:1])
    begin = prompt.states[:1].clone()
    wide = [x[0].double() for x in (q, k, v, *gates)]
    reference = gated_delta_chunked(*wide, cu_seqlens=WHOLE, initial_state=begin.double())
    cu_seqlens = torch.tensor(WHOLE, dtype=torch.int32, device="cuda")

    def denim() -> tuple[Tensor, Tensor]:
        raw = (prompt.rows[0], prompt.b[0], prompt.a[0], prompt.a_log, prompt.dt_bias)
        return gated_delta_chunks(
            *raw, prompt.table(0, CHUNK), prompt.states, prompt.key_heads
        ), prompt.states[:1]

    runs = {
        "Denim": denim,
        "fla": lambda: peers.fla_delta_prefill(q, k, v, *gates, begin, None),
        "FlashQLA": lambda: peers.flashqla_delta_prefill(q, k, v, *gates, begin, cu_seqlens),
        "FlashInfer": lambda: peers.flashinfer_delta_prefill(
            *(x[0] for x in (q, k, v, gates[0].exp(), gates[1])), begin, cu_seqlens, TOKENS, "auto"
        ),
    }
    yield from compared("GDN prefill", inputs, reference, runs)

    first = [x[:STEPS] for x in wide]
    reference = gated_delta_chunked(*first, cu_seqlens=[0, STEPS], initial_state=begin.double())
    slots = torch.zeros(1, dtype=torch.int64, device="cuda")

    def step_by_step() -> tuple[Tensor, Tensor]:
        state = begin.clone()
        rows = [x[0].unsqueeze(1) for x in (q, k, v, *gates)]
        outs = [delta_rule_step(*(x[t] for x in rows), slots, state) for t in range(STEPS)]
        return torch.cat(outs), state

    runs = {
        "Denim": step_by_step,
        "fla": lambda: peers.fla_delta_steps(*(x[:, :STEPS] for x in (q, k, v, *gates)), begin),
    }
    yield from compared("GDN decode", inputs, reference, runs)


def _kimi(inputs: str, prompt: Prompt, shift: float) -> Iterator[Error]:
    q, k, v = (x[:1] for x in prompt.split())
    beta, begin = prompt.beta[:1], prompt.states[:1].clone()
    f = torch.randn(TOKENS, KIMI_HEADS * DIM, **BF16) + shift
    dt_bias = torch.full((KIMI_HEADS * DIM,), -2.0, device="cuda")
    softplus = F.softplus(f.float() + dt_bias).view(1, TOKENS, KIMI_HEADS, DIM)
    log_decay = -prompt.a_log.exp().unsqueeze(-1) * softplus
    wide = [x[0].double() for x in (q, k, v, log_decay, beta)]
    reference = gated_delta_chunked(*wide, cu_seqlens=WHOLE, initial_state=begin.double(), chunk_size=16)

    def denim() -> tuple[Tensor, Tensor]:
        raw = (prompt.rows[0], prompt.b[0], f, prompt.a_log, dt_bias)
        return kimi_delta_chunks(*raw, prompt.table(0, CHUNK), prompt.states), prompt.states[:1]

    runs = {"Denim": denim, "fla": lambda: peers.fla_kimi_prefill(q, k, v, log_decay, beta, begin)}
    yield from compared("KDA prefill", inputs, reference, runs)


def _ssd(inputs: str, shift: float) -> Iterator[Error]:
    x = torch.randn(TOKENS, SSD_HEADS, SSD_DIM, **BF16)
    b, c = torch.randn(2, TOKENS, 1, SSD_STATE, **BF16)
    dt = torch.randn(TOKENS, SSD_HEADS, **BF16) + shift
    a_log, d = torch.rand(2, SSD_HEADS, device="cuda")
    dt_bias = torch.full((SSD_HEADS,), -2.0, device="cuda")
    states = torch.randn(1, SSD_HEADS, SSD_DIM, SSD_STATE, device="cuda")
    begin = states.clone()
    delta = F.softplus(dt.double() + dt_bias)
    value = x.double()
    out, last = gated_accumulation_chunked(
        c.double(),
        b.double(),
        value * delta.unsqueeze(-1),
        -a_log.double().exp() * delta,
        cu_seqlens=WHOLE,
        initial_state=begin.double(),
        scale=1.0,
    )
    reference = (out + value * d.unsqueeze(-1), last)
    (table,) = tables(TOKENS, 1, 1, chunk_tokens(x.dtype))

    def denim() -> tuple[Tensor, Tensor]:
        step = TimeStep(dt, dt_bias)
        return accumulation_chunks(c, b, x, a_log, table, states, time_step=step, skip=d), states

    def mamba() -> tuple[Tensor, Tensor]:
        rows = (t.unsqueeze(0) for t in (x, dt))
        return peers.mamba_prefill(*rows, -a_log.exp(), b.unsqueeze(0), c.unsqueeze(0), d, dt_bias, begin)

    yield from compared("SSD prefill", inputs, reference, {"Denim": denim, "mamba-ssm": mamba})


def _lightning(inputs: str) -> Iterator[Error]:
    shape = (TOKENS, LIGHTNING_HEADS, LIGHTNING_DIM)
    q, k, v = torch.randn(3, *shape, **BF16)
    log_decay = -torch.rand(LIGHTNING_HEADS, device="cuda") * LIGHTNING_SPREAD[inputs]
    states = torch.randn(1, LIGHTNING_HEADS, LIGHTNING_DIM, LIGHTNING_DIM, device="cuda")
    begin = states.clone()
    wide = [t.double() for t in (q, k, v, log_decay)]
    reference = gated_accumulation_chunked(*wide, cu_seqlens=WHOLE, initial_state=begin.double(), scale=1.0)
    (table,) = tables(TOKENS, 1, 1, chunk_tokens(q.dtype))
    rows = [t.unsqueeze(0) for t in (q, k, v)]
    runs = {
        "Denim": lambda: (accumulation_chunks(q, k, v, log_decay, table, states), states),
        "fla": lambda: peers.fla_accumulation_prefill(*rows, log_decay, begin),
    }
    yield from compared("lightning prefill", inputs, reference, runs)


def _scan(inputs: str, shift: float) -> Iterator[Error]:
    x, z = torch.randn(2, TOKENS, SCAN_CHANNELS, **BF16)
    dt = torch.randn(TOKENS, SCAN_CHANNELS, **BF16) + shift
    bc = torch.randn(TOKENS, 2 * SCAN_STATE, **BF16)
    dt_bias = torch.full((SCAN_CHANNELS,), -2.0, device="cuda")
    d = torch.rand(SCAN_CHANNELS, device="cuda")
    a_log = torch.rand(SCAN_CHANNELS, SCAN_STATE, device="cuda")
    states = torch.randn(1, SCAN_CHANNELS, SCAN_STATE, device="cuda")
    begin = states.clone()
    b, c = bc.double().chunk(2, -1)
    delta = F.softplus(dt.double() + dt_bias)
    out, last = selective_scan_chunked(
        x.double(),
        delta,
        -a_log.double().exp(),
        b,
        c,
        d.double(),
        cu_seqlens=WHOLE,
        initial_state=begin.double(),
    )
    reference = (out * F.silu(z.double()), last)
    (table,) = tables(TOKENS, 1, 1, CHUNK_TOKENS)

    def denim() -> tuple[Tensor, Tensor]:
        fixed = (dt_bias, a_log, d, bc, None, None, None)
        return selective_scan_chunks(x, dt, *fixed, z, table, states), states

    yield from compared("selective scan prefill", inputs, reference, {"Denim": denim})


def _shifted(prompt: Prompt, shift: float) -> Prompt:
    a = prompt.a + shift
    log_decay = -prompt.a_log.exp() * F.softplus(a.float() + prompt.dt_bias)
    return prompt._replace(a=a, log_decay=log_decay)
