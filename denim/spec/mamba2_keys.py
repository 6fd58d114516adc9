"""Keys of Mamba2 layers that several families share.

Owns the `mamba_*` spelling (Bamba, Granite-4, Falcon-H1) and the limits of Δ. Knows nothing of what else a
family's config holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from denim.spec.fields import Fields, is_number
from denim.spec.linear import Mamba2

NO_LIMIT = (0.0, inf)


def read_mamba2(fields: Fields, hidden: int) -> Mamba2:
    """The mixer that the `mamba_*` keys describe. Its inner width is mamba_d_ssm, or else mamba_expand × the
    hidden size.

    Defaults are transformers' own: mamba_d_head "auto", an equal share of the inner width; mamba_n_groups 1,
    mamba_d_conv 4, mamba_expand 2; a bias in the convolution, none in the projections.
    """
    heads = fields.positive_int("mamba_n_heads")
    inner = fields.positive_int(
        "mamba_d_ssm", default=fields.positive_int("mamba_expand", default=2) * hidden
    )
    if inner % heads:
        raise fields.error("mamba_n_heads", f"a divisor of the inner width ({inner})")
    if fields.get("mamba_d_head") not in (None, "auto", inner // heads):
        raise fields.error("mamba_d_head", f"{inner // heads}, the inner width {inner} over mamba_n_heads")
    fields.ignore("mamba_chunk_size")  # the size of Denim's own chunks changes no value
    return Mamba2(
        num_heads=heads,
        head_dim=inner // heads,
        state_dim=fields.positive_int("mamba_d_state"),
        num_groups=read_groups(fields, "mamba_n_groups", heads, 1),
        conv_width=fields.positive_int("mamba_d_conv", default=4),
        conv_bias=fields.flag("mamba_conv_bias", default=True),
        proj_bias=fields.flag("mamba_proj_bias", default=False),
    )


def read_groups(fields: Fields, key: str, heads: int, default: int | None = None) -> int:
    """The number of groups of B and C, which must divide the heads."""
    groups = fields.positive_int(key, default=default)
    if heads % groups:
        raise fields.error(key, f"a divisor of the number of heads ({heads})")
    return groups


def read_time_step_limit(fields: Fields) -> tuple[float, float]:
    """Least and largest Δ from time_step_limit; none if the key is missing.

    Infinity is JSON's own extension, or an object under "__float__" (transformers 5).
    """
    value = fields.get("time_step_limit")
    if value is None:
        return NO_LIMIT
    bounds = [_bound(bound) for bound in value] if isinstance(value, list) else []
    if len(bounds) != 2 or not all(is_number(bound) for bound in bounds) or not 0 <= bounds[0] < bounds[1]:
        raise fields.error("time_step_limit", "a list of two numbers, 0 ≤ least < largest")
    return float(bounds[0]), float(bounds[1])


def _bound(value: Any) -> Any:
    if isinstance(value, Mapping) and value.get("__float__") == "Infinity":
        return inf
    return value
