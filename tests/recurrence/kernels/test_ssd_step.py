"""The fused decode step of Mamba2 against the plain parts that it stands for."""

from __future__ import annotations

from math import inf

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from denim.layers.norm import GroupedGatedRMSNorm
from denim.recurrence.gated_accumulation import gated_accumulation_step
from denim.recurrence.kernels.ssd_step import ssd_step_fused
from denim.recurrence.short_conv import short_conv_step
from tests.recurrence.kernels.slots import BOUND, DEVICE, DTYPES, check_close, check_slots, slots_of

EPS = 1e-5


def plain(
    projected: Tensor,
    conv: Tensor,
    bias: Tensor | None,
    head: dict[str, Tensor],
    norm: GroupedGatedRMSNorm | None,
    window: Tensor,
    state: Tensor,
    groups: int,
    limit: tuple[float, float],
) -> Tensor:
    """The layer's own operations on rows; window and state are updated in place."""
    _, heads, value_dim, key_dim = state.shape
    inner, keys = heads * value_dim, groups * key_dim
    z, xbc, dt = projected.split((inner, inner + 2 * keys, heads), -1)
    mixed = short_conv_step(xbc, conv, window).float()
    mixed = F.silu(mixed if bias is None else mixed + bias.float())
    x, b, c = mixed.split((inner, keys, keys), -1)
    x = x.unflatten(-1, (heads, value_dim))
    b, c = (t.unflatten(-1, (groups, key_dim)) for t in (b, c))
    delta = F.softplus(dt.float() + head["dt_bias"]).clamp(*limit)
    y = gated_accumulation_step(c, b, x * delta.unsqueeze(-1), -head["a_log"].exp() * delta, state, scale=1.0)
    y = (y + x * head["d"].unsqueeze(-1)).flatten(1)
    return (y * F.silu(z.float())).to(z.dtype) if norm is None else norm(y, z)


# Heads, groups, P, N, width; a GPU takes those of Nemotron-H and of Falcon-H1 as well.
SIZES = [(4, 2, 16, 16, 4), (6, 1, 12, 20, 2)]
if DEVICE == "cuda":
    SIZES += [(128, 8, 64, 128, 4), (32, 1, 64, 256, 4)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("norm_groups, before_gate", [(0, False), (1, False), (2, False), (1, True)])
def test_equals_the_plain_parts(
    sizes: tuple[int, int, int, int, int], dtype: torch.dtype, norm_groups: int, before_gate: bool
) -> None:
    heads, groups, value_dim, key_dim, width = sizes
    inner, channels = heads * value_dim, heads * value_dim + 2 * groups * key_dim
    generator = torch.Generator().manual_seed(0)
    rows = [3, -1, 8, 0]

    def randn(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator).to(of)

    projected = randn(len(rows), inner + channels + heads + 8, of=dtype)[:, :-8]
    conv, bias = randn(channels, width, of=dtype), randn(channels, of=dtype) if norm_groups else None
    head = {name: randn(heads) for name in ("a_log", "d", "dt_bias")}
    windows, states = (
        randn(len(rows), width - 1, channels, of=dtype),
        randn(len(rows), heads, value_dim, key_dim),
    )
    norm = None
    if norm_groups:
        norm = GroupedGatedRMSNorm(
            inner, EPS, groups=norm_groups, before_gate=before_gate, dtype=torch.float32, device="cpu"
        )
        norm.weight.data.normal_(generator=generator)
        norm.prepare()
    limit = (0.1, 1.0) if norm_groups == 2 else (0.0, inf)
    window, state = slots_of(rows, windows), slots_of(rows, states)
    out = ssd_step_fused(
        projected.to(DEVICE),
        conv.to(DEVICE),
        None if bias is None else bias.to(DEVICE),
        *(head[name].to(DEVICE) for name in ("a_log", "d", "dt_bias")),
        None if norm is None else norm.scale.to(DEVICE),
        EPS,
        max(1, norm_groups),
        before_gate,
        torch.tensor(rows, device=DEVICE),
        window,
        state,
        groups,
        limit,
    )
    want = plain(projected, conv, bias, head, norm, windows, states, groups, limit)
    live = [0, 2, 3]
    # Both sides round: the plain parts the convolution and the output, the kernels what SiLU makes as well.
    check_close(out[live], want[live], 2 * BOUND[dtype])  # 7.2e-3 seen in bf16
    check_slots(window, rows, windows, 0)
    check_slots(state, rows, states, BOUND[dtype])
