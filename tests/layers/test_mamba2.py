"""The Mamba2 layer with all its options, against the rule written out token by token."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from denim.layers.batch import StepBatch
from denim.layers.mamba2 import GateNorm, Mamba2Layer
from denim.spec.linear import Mamba2
from tests.batches import batch_of, span_of

HIDDEN, TOKENS, EPS = 20, 90, 1e-3
SCALES = (0.5, 2.0, 0.7, 1.3, 1.1)


class OneSlot:
    """Memory of one layer, poisoned before use."""

    def __init__(self, spec: Mamba2) -> None:
        self.tensors = {
            tensor.role: torch.full((2, *tensor.shape), torch.nan)
            for tensor in spec.state_tensors("float32", "float32")
        }

    def kv(self, layer: int) -> Tensor:
        raise AssertionError("there is none")

    def state(self, layer: int, role: str) -> Tensor:
        return self.tensors[role]


def batch(memory: OneSlot, start: int, end: int) -> StepBatch:
    return batch_of([span_of(start, end, 1 if start else -1, 1)], memory)


def written_out(layer: Mamba2Layer, x: Tensor, norm: GateNorm | None, scaled: bool) -> Tensor:
    """Dao and Gu's recurrence in float64, one token and one head at a time."""
    spec = layer.spec
    wide = {name: p.double() for name, p in layer.named_parameters()}
    projected = x.double() @ wide["in_proj.weight"].T + wide.get("in_bias", torch.zeros(()))
    groups = spec.num_groups * spec.state_dim
    sizes = (spec.inner, spec.inner, groups, groups, spec.num_heads)
    z, *convolved, dt = projected.split(sizes, dim=-1)
    if scaled:
        z, dt = z * SCALES[0], dt * SCALES[4]
        convolved = [part * scale for part, scale in zip(convolved, SCALES[1:4], strict=True)]
    xbc = torch.cat(convolved, dim=-1)
    padded = torch.cat((xbc.new_zeros(spec.conv_width - 1, xbc.shape[1]), xbc))
    taps = [padded[j : j + len(x)] * wide["conv"][:, j] for j in range(spec.conv_width)]
    mixed = F.silu(torch.stack(taps).sum(0) + wide.get("conv_bias", torch.zeros(())))
    values, b, c = mixed.split((spec.inner, groups, groups), dim=-1)
    delta = F.softplus(dt + wide["dt_bias"]).clamp(*layer.time_step_limit)

    rows = []
    state = x.new_zeros(spec.num_heads, spec.head_dim, spec.state_dim, dtype=torch.float64)
    for t in range(len(x)):
        outs = []
        for head in range(spec.num_heads):
            group = head // (spec.num_heads // spec.num_groups)  # a group serves consecutive heads
            at = slice(group * spec.state_dim, (group + 1) * spec.state_dim)
            value = values[t, head * spec.head_dim : (head + 1) * spec.head_dim]
            decay = torch.exp(-delta[t, head] * wide["A_log"][head].exp())
            state[head] = decay * state[head] + torch.outer(delta[t, head] * value, b[t, at])
            outs.append(state[head] @ c[t, at] + wide["D"][head] * value)
        rows.append(torch.cat(outs))
    y, gate = torch.stack(rows), F.silu(z)
    if norm is None:
        y = y * gate
    else:
        y = y if norm.before_gate else y * gate
        parts = y.unflatten(-1, (norm.groups, -1))
        parts = parts / (parts.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        y = parts.flatten(-2) * wide["norm.weight"]
        y = y * gate if norm.before_gate else y
    return y @ wide["out.weight"].T + wide.get("out_bias", torch.zeros(()))


@pytest.mark.parametrize("norm", [None, GateNorm(EPS), GateNorm(EPS, 3), GateNorm(EPS, 2, before_gate=True)])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("limit", [(0.0, inf), (0.5, 0.9)])
@pytest.mark.parametrize("scaled", [False, True])
def test_all_options(norm: GateNorm | None, biases: bool, limit: tuple[float, float], scaled: bool) -> None:
    """In segments and single tokens, over poisoned memory."""
    spec = Mamba2(6, 5, 7, num_groups=3, conv_width=4, conv_bias=biases, proj_bias=biases)
    layer = Mamba2Layer(
        spec,
        HIDDEN,
        0,
        gate_norm=norm,
        chunk_size=16,
        dtype=torch.float32,
        device="cpu",
        time_step_limit=limit,
        projection_scales=SCALES if scaled else None,
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.normal_(std=0.4, generator=generator)
    if layer.norm is not None:
        layer.norm.prepare()
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    expected = written_out(layer, x, norm, scaled)
    memory = OneSlot(spec)
    cuts = [0, 1, 3, 40, 41, 42, TOKENS]
    got = torch.cat([layer(x[start:end], batch(memory, start, end)) for start, end in pairwise(cuts)])
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
