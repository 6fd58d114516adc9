"""How far a state that is kept in few bits drifts from the exact one.

Owns the run of the gated delta rule under several storages side by side, against float64, and the errors at
chosen lengths. Knows the rule and the storages; must not know where the inputs come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
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
def drift(inputs: RuleInputs, storages: Sequence[Storage]) -> dict[str, Any]:
    """Errors of every storage against float64, at `points_of` the length.

    Arithmetic is fp32, token by token by the engine's own step; between two tokens a state is what its
    storage makes of it. An error is ||x - exact|| / ||exact|| of a head, for the state at a point, for the
    outputs over the tokens since the point before; curves are means over the heads, `worst_head` the largest
    at the end. Runs where `inputs` lie. Returns {points, checkpoint, storages: {name: {state, output,
    worst_head}}}.
    """
    tokens, heads, d_v = inputs.v.shape
    checkpoint = max(1, tokens // CHECKPOINT_SHARE)
    points = points_of(tokens, checkpoint)
    longest = max(end - start for start, end in pairwise([0, *points]))
    walk = _Walk(inputs, storages, longest)
    exact = inputs.v.new_zeros(1, heads, d_v, inputs.k.shape[2], dtype=torch.float64)
    curves: dict[str, dict[str, Any]] = {s.name: {"state": [], "output": []} for s in storages}
    for start, end in pairwise([0, *points]):
        wanted, exact = gated_delta_chunked(
            *(x.double() for x in inputs.part(start, end)), cu_seqlens=[0, end - start], initial_state=exact
        )
        outs = walk.advance(end - start)
        for i, storage in enumerate(storages):
            if storage.once and end == checkpoint:
                walk.keep(i)
            of_state = relative_error(walk.states[i], exact[0])
            of_outs = relative_error(outs[:, i].transpose(0, 1), wanted.transpose(0, 1))
            curve = curves[storage.name]
            curve["state"].append(of_state.mean().item())
            curve["output"].append(of_outs.mean().item())
            curve["worst_head"] = of_state.max().item()
    return {"points": points, "checkpoint": checkpoint, "storages": curves}


class _Walk:
    """The states of all storages, [storages, Hv, d_v, d_k], on their way through the same tokens.

    On a CUDA device a token is a captured graph: its kernels are so small that their launches would take
    several times as long as they do. So a token finds its place in `inputs` and among the outputs by itself.
    """

    def __init__(self, inputs: RuleInputs, storages: Sequence[Storage], longest: int) -> None:
        """`longest`: of any stretch that `advance` is asked for."""
        _, heads, d_v = inputs.v.shape
        device = inputs.v.device
        self.inputs = inputs
        self.storages = storages
        self.generator = torch.Generator(device).manual_seed(0)
        self.states = inputs.v.new_zeros(len(storages), heads, d_v, inputs.k.shape[2])
        self._outs = inputs.v.new_zeros(longest, len(storages), heads, d_v)
        self._at = torch.zeros(2, dtype=torch.int64, device=device)  # of all tokens, of this stretch
        self._token = self._captured() if device.type == "cuda" else self._step

    def advance(self, tokens: int) -> Tensor:
        """Apply the next `tokens` tokens; their outputs [tokens, storages, Hv, d_v], good until the next."""
        self._at[1] = 0
        for _ in range(tokens):
            self._token()
        return self._outs[:tokens]

    def keep(self, i: int) -> None:
        """Make of the i-th state what its storage keeps of it."""
        self.states[i] = self.storages[i].kept(self.states[i], self.generator)

    def _step(self) -> None:
        of_all, of_stretch = self._at.split(1)
        now = (x.index_select(0, of_all) for x in self.inputs)
        q, k, v, log_decay, beta = (x.expand(len(self.storages), *x.shape[1:]) for x in now)
        out = gated_delta_step(q, k, v, log_decay, beta, self.states)
        self._outs.index_copy_(0, of_stretch, out.unsqueeze(0))
        for i, storage in enumerate(self.storages):
            if not storage.once:
                self.keep(i)
        self._at += 1

    def _captured(self) -> Callable[[], None]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step()  # makes the workspaces of products, which a capture may not
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        with torch.cuda.graph(graph):
            self._step()
        self.states.zero_()
        self._at.zero_()
        return graph.replay


def relative_error(x: Tensor, exact: Tensor) -> Tensor:
    """||x - exact|| / ||exact|| of each head, [heads, ...] to [heads], in float64."""
    wrong = (x.double() - exact).flatten(1).norm(dim=1)
    return wrong / exact.flatten(1).norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
