"""What does not mix tokens: feed-forward networks, dense and sparse, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NoFFN:
    """A layer that is a mixer alone."""

    def parameters(self, hidden: int) -> int:
        return 0

    def active_parameters(self, hidden: int) -> int:
        return 0


@dataclass(frozen=True)
class DenseFFN:
    """down(act(gate(x)) * up(x)), SwiGLU with act = silu; not `gated`: down(act(up(x))).

    `activation`: "silu", "gelu" (exact) or "relu2" (relu squared).
    """

    intermediate: int
    activation: str = "silu"
    gated: bool = True

    def parameters(self, hidden: int) -> int:
        return (3 if self.gated else 2) * hidden * self.intermediate

    def active_parameters(self, hidden: int) -> int:
        """Parameters that one token is multiplied with."""
        return self.parameters(hidden)


@dataclass(frozen=True)
class MoEFFN:
    """Each token goes through its `top_k` of `num_experts` experts, and through one shared expert.

    `scoring`: "softmax" over all experts, "softmax_top_k" over the chosen ones only, or "sigmoid".
    `renormalise`: the chosen weights are divided by their sum, to which the published code adds `guard`.
    `scale` multiplies them at the end.
    `selection_bias`: a learned bias decides with the scores which experts are chosen, and does not weigh.
    `groups`, `top_groups`: experts are chosen within the best groups only (1, 1: no groups); a group counts
    as the sum of its two best scores.
    `exact_router`: the router's weight and product are fp32 whatever the model's dtype.
    `shared_intermediate` 0: no shared expert; `shared_gate`: it stands behind a sigmoid gate.
    `activation`, `gated`: as in `DenseFFN`, for all experts.
    `latent` 0: experts work on the hidden state; else on a projection of it to so many dims, and the sum of
    their outputs is projected back (LatentMoE; the shared expert is outside).
    """

    num_experts: int
    top_k: int
    intermediate: int
    shared_intermediate: int = 0
    scoring: str = "softmax"
    renormalise: bool = True
    guard: float = 1e-20
    scale: float = 1.0
    selection_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    exact_router: bool = False
    shared_gate: bool = True
    activation: str = "silu"
    gated: bool = True
    latent: int = 0

    @property
    def _matrices(self) -> int:
        return 3 if self.gated else 2

    def parameters(self, hidden: int) -> int:
        expert = self._matrices * (self.latent or hidden) * self.intermediate
        bias = self.num_experts if self.selection_bias else 0
        return self.num_experts * (expert + hidden) + bias + self._every_token(hidden)

    def active_parameters(self, hidden: int) -> int:
        chosen = self.top_k * self._matrices * (self.latent or hidden) * self.intermediate
        return chosen + self.num_experts * hidden + self._every_token(hidden)

    def _every_token(self, hidden: int) -> int:
        """The shared expert, and the projections to the latent and back."""
        latent = 2 * hidden * self.latent
        if not self.shared_intermediate:
            return latent
        gate = hidden if self.shared_gate else 0
        return latent + self._matrices * hidden * self.shared_intermediate + gate


FFN = NoFFN | DenseFFN | MoEFFN
