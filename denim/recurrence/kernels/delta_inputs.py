"""What one decode step of a delta-rule layer takes between its projections, by name.

Owns the description, and the order in which kernels take it: `fused_delta_step`, and on Hopper
`hopper_delta_step` and `hopper_delta_spread`. Knows no kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from denim.recurrence.gated_delta import L2NORM_EPS


class DeltaInputs(NamedTuple):
    """One token for each of B rows of a layer with Hk key heads and Hv value heads.

    Of the projections, in the model's dtype, rows dense and any distance apart: qkv, [B, at least channels],
    before the short convolution; z, [B, Hv·d_v], the output gate; b, [B, Hv], with β = beta_limit ·
    sigmoid(b); a, [B, Hv] or, for a decay per key channel, [B, Hv·d_k]. The log of the decay is
    -exp(a_log) softplus(a + dt_bias), or decay_floor · sigmoid(exp(a_log) (a + dt_bias)).

    Of the layer: conv_taps [W, channels], dense; a_log [Hv] fp32; dt_bias, as many as a row of a; norm_scale
    [d_v] fp32.

    Of the arena, updated in place: window [slots, W - 1, channels], state [slots, Hv, d_v, d_k]; slots: [B]
    int64, negative for padding.
    """

    qkv: Tensor
    z: Tensor
    b: Tensor
    a: Tensor
    conv_taps: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm_scale: Tensor
    norm_eps: float
    slots: Tensor
    window: Tensor
    state: Tensor
    beta_limit: float = 1.0
    decay_floor: float | None = None

    @property
    def rows(self) -> int:
        return self.qkv.shape[0]

    @property
    def key_heads(self) -> int:
        _, value_heads, value_dim, key_dim = self.state.shape
        return (self.window.shape[2] - value_heads * value_dim) // (2 * key_dim)

    @property
    def vector_decay(self) -> bool:
        """A decay per key channel, as KDA has it; the output gate then is a sigmoid, and else a SiLU."""
        return self.dt_bias.numel() > self.a_log.numel()

    def check(self) -> None:
        """Raises AssertionError for tensors that do not lie as kernels take them."""
        assert all(part.stride(1) == 1 for part in (self.qkv, self.z, self.b, self.a))
        assert self.window.stride(1) == self.window.shape[2]
        assert self.conv_taps.is_contiguous() and self.state[0].is_contiguous()

    def new_output(self) -> Tensor:
        """[B, Hv·d_v] in the model's dtype, for what goes into the output projection."""
        _, value_heads, value_dim, _ = self.state.shape
        return self.qkv.new_empty(self.rows, value_heads * value_dim)

    def tensors(self) -> tuple[Any, ...]:
        """The first arguments of each kernel: pointers, and the distances of rows and slots."""
        rows = (t for part in (self.qkv, self.z, self.b, self.a) for t in (part, part.stride(0)))
        weights = (self.conv_taps, self.a_log, self.dt_bias, self.norm_scale)
        return (*rows, *weights, self.slots, self.window, self.window.stride(0))

    def numbers(self) -> tuple[float, ...]:
        """The scale of q, what keeps norms of q and k and of the output finite, beta_limit, decay_floor."""
        scale = self.state.shape[3] ** -0.5
        return (scale, L2NORM_EPS, self.norm_eps, self.beta_limit, self.decay_floor or 0.0)

    def constants(self) -> dict[str, int]:
        """What a kernel is compiled for."""
        key_heads, vector_decay = self.key_heads, self.vector_decay
        return {
            "key_heads": key_heads,
            "group": self.state.shape[1] // key_heads,
            "vector_decay": vector_decay,
            "floored": self.decay_floor is not None,
            "sigmoid_gate": vector_decay,
            "width": self.conv_taps.shape[0],
        }
