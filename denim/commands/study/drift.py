"""How far a state that is kept in few bits drifts from the exact one.

Owns the run of the gated delta rule under several storages side by side, against float64, and the errors at
chosen lengths. Knows the rule and the storages; must not know where the inputs come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from denim.commands.study.storage import Storage
from denim.recurrence.gated_delta import gated_delta_chunked, gated_delta_step

FIRST_POINT = 16
POINTS_PER_OCTAVE = 8
CHECKPOINT_SHARE = 8  # the checkpoint is taken behind an eighth of the tokens


class RuleInputs(NamedTuple):
    """What the rule reads, fp32: q, k [T, Hk, d_k] (normalised), v [T, Hv, d_v], log_decay, beta [T, Hv]."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor

    def part(self, start: int, end: int) -> RuleInputs:
        return RuleInputs(*(x[start:end] for x in self))


def points_of(tokens: int, checkpoint: int) -> list[int]:
    """Lengths to look at: evenly on a log scale, the checkpoint, and the powers of two behind it."""
    points = {tokens, checkpoint}
    step = 0
    while (point := round(FIRST_POINT * 2 ** (step / POINTS_PER_OCTAVE))) < tokens:
        points.add(point)
        step += 1
    behind = 1
    while checkpoint + behind < tokens:
        points.add(checkpoint + behind)
        behind *= 2
    return sorted(points)


@torch.inference_mode()
def drift(inputs: RuleInputs, storages: Sequence[Storage], seed: int = 0) -> dict[str, Any]:
    """Errors of every storage against float64, at `points_of` the length.

    Arithmetic is fp32, token by token by the engine's own step; between two tokens a state is what its
    storage makes of it. An error is ||x - exact|| / ||exact|| of a head, for the state at a point, for the
    outputs over the tokens since the point before; curves are means over the heads, `worst_head` the largest
    at the end. Returns {points, checkpoint, storages: {name: {state, output, worst_head}}}.
    """
    tokens, heads, d_v = inputs.v.shape
    d_k = inputs.k.shape[2]
    checkpoint = max(1, tokens // CHECKPOINT_SHARE)
    points = points_of(tokens, checkpoint)
    generator = torch.Generator(inputs.v.device).manual_seed(seed)
    states = inputs.v.new_zeros(len(storages), heads, d_v, d_k)
    exact = inputs.v.new_zeros(1, heads, d_v, d_k, dtype=torch.float64)
    curves: dict[str, dict[str, Any]] = {s.name: {"state": [], "output": []} for s in storages}
    start = 0
    for end in points:
        part = inputs.part(start, end)
        wanted, exact = gated_delta_chunked(
            *(x.double() for x in part), cu_seqlens=[0, end - start], initial_state=exact
        )
        outs = _advance(part, storages, states, generator)
        for i, storage in enumerate(storages):
            if storage.once and end == checkpoint:
                states[i] = storage.kept(states[i], generator)
            of_state = relative_error(states[i], exact[0])
            of_outs = relative_error(outs[:, i].transpose(0, 1), wanted.transpose(0, 1))
            curve = curves[storage.name]
            curve["state"].append(of_state.mean().item())
            curve["output"].append(of_outs.mean().item())
            curve["worst_head"] = of_state.max().item()
        start = end
    return {"points": points, "checkpoint": checkpoint, "storages": curves}


def _advance(
    part: RuleInputs, storages: Sequence[Storage], states: Tensor, generator: torch.Generator
) -> Tensor:
    """Applies the tokens to `states` [storages, Hv, d_v, d_k] in place; outputs [T, storages, Hv, d_v]."""
    every_token = [(i, storage) for i, storage in enumerate(storages) if not storage.once]
    outs = []
    for t in range(len(part.q)):
        q, k, v, log_decay, beta = (x[t].expand(len(storages), *x.shape[1:]) for x in part)
        outs.append(gated_delta_step(q, k, v, log_decay, beta, states))
        for i, storage in every_token:
            states[i] = storage.kept(states[i], generator)
    return torch.stack(outs)


def relative_error(x: Tensor, exact: Tensor) -> Tensor:
    """||x - exact|| / ||exact|| of each head, [heads, ...] to [heads], in float64."""
    wrong = (x.double() - exact).flatten(1).norm(dim=1)
    return wrong / exact.flatten(1).norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
