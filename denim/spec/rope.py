"""Rotary position embedding as config files write it.

Owns the two spellings: `rope_parameters` (transformers 5) and `rope_scaling` with `rope_theta` beside it
(before). A value given twice must agree. Knows nothing of families or of how the angles are computed.
"""

from __future__ import annotations

from typing import NamedTuple

from denim.spec.fields import Fields
from denim.spec.model import Rope

SUPPORTED_ROPE = ("default", "yarn")


class RopeReading(NamedTuple):
    rope: Rope
    rotary_dim: int
    max_position: int


def read_rope(fields: Fields, head_dim: int, max_position: int, default_partial: float = 1.0) -> RopeReading:
    """The model's rotary embedding.

    `max_position` is max_position_embeddings. With YaRN the context is the larger of that and
    factor × original length, since configs state either. `default_partial` is the family's
    partial_rotary_factor where the config has none. Raises ConfigError for other kinds of RoPE,
    for unknown keys and for contradictions.
    """
    spellings = [key for key in ("rope_parameters", "rope_scaling") if key in fields]
    if len(spellings) == 2 and fields.get(spellings[0]) != fields.get(spellings[1]):
        raise fields.error("rope_scaling", "one of rope_parameters and rope_scaling, or both alike")
    parameters = fields.section(spellings[0] if spellings else "rope_parameters", default={})
    fields.ignore("rope_scaling")

    for key in ("rope_type", "type"):
        parameters.choice(key, SUPPORTED_ROPE, default="default")
    if "rope_type" in parameters:
        parameters.demand("type", [parameters.get("rope_type")])
    kind = parameters.get("rope_type") or parameters.get("type") or "default"

    theta = _either(fields, parameters, "rope_theta", None)
    partial = _either(fields, parameters, "partial_rotary_factor", default_partial)
    rotary_dim = int(head_dim * partial)
    if partial > 1 or rotary_dim < 2 or rotary_dim % 2:
        where = parameters if "partial_rotary_factor" in parameters else fields
        raise where.error(
            "partial_rotary_factor", f"at most 1, turning an even part of the {head_dim} dims of a head"
        )
    # For text all sections of a multimodal RoPE have the same positions, so they change nothing.
    parameters.ignore("mrope_section", "mrope_interleaved")
    if kind == "default":
        parameters.finish()
        return RopeReading(Rope(theta=theta), rotary_dim, max_position)

    original = parameters.positive_int("original_max_position_embeddings", default=max_position)
    factor = parameters.number("factor")
    if factor < 1:
        raise parameters.error("factor", "a number of at least 1")
    rope = Rope(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_position=original,
        beta_fast=parameters.number("beta_fast", default=32.0),
        beta_slow=parameters.number("beta_slow", default=1.0),
        attention_factor=parameters.optional_number("attention_factor"),
        mscale=parameters.optional_number("mscale"),
        mscale_all_dim=parameters.optional_number("mscale_all_dim"),
        truncate=parameters.flag("truncate", default=True),
    )
    parameters.finish()
    return RopeReading(rope, rotary_dim, max(max_position, int(factor * original)))


def _either(fields: Fields, parameters: Fields, key: str, default: float | None) -> float:
    """A number that may stand beside the RoPE section or inside it.

    Where both are there they must agree; but transformers up to 5.17 saves its own `default` beside the
    section whatever stands inside, so that value gives way.
    """
    outer = fields.optional_number(key)
    inner = parameters.number(key, default=default if outer is None else outer)
    if outer not in (None, default) and inner != outer:
        raise parameters.error(key, f"{outer!r}, as {fields.where} says, or only one of the two")
    return inner
