"""A published model with a few of its dims turned: what would it cost with more layers, or fewer KV heads?

Owns which dims can be turned, to what, and how a spec follows; a spec of which nothing is turned stays as it
is. Knows no bytes and no page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from denim.errors import ConfigError
from denim.spec.attention import FullAttention, LatentAttention
from denim.spec.linear import GatedDeltaNet, KimiDelta, Lightning, Mamba1, Mamba2, ShortConv
from denim.spec.mixers import Mixer, NoMixer
from denim.spec.model import Layer, ModelSpec
from denim.spec.parallel import Parallel

LAYERS, FULL_SHARE = "layers", "full_share"

MOST_LAYERS = 128
SHARES = tuple(range(0, 101, 5))  # percent

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 256, 320, 384, 512)
STATE_DIMS = (8, 16, 32, 64, 96, 128, 192, 256)
LATENT_DIMS = (64, 128, 256, 384, 512, 768, 1024)
COUNTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 192, 256)
CHANNELS = tuple(1024 * n for n in (1, 2, 3, 4, 6, 8, 10, 12, 16, 24, 32))
"""What a dim can be turned to, beside what it is; the range of published models, and a little more."""


class Dial(NamedTuple):
    """One dim of a model: its `value` is among `values`, which ascend. `full_share` is in percent."""

    name: str
    label: str
    value: float
    values: tuple[float, ...]


class _Field(NamedTuple):
    """A dial's place in a mixer: `attribute` takes the value; `tied` keeps its proportion to it."""

    name: str
    label: str
    attribute: str
    values: tuple[int, ...]
    tied: str | None = None


_HEADS, _KEYS, _VALUES = "linear_heads", "key_dim", "value_dim"

_FIELDS: dict[type[Mixer], tuple[_Field, ...]] = {
    FullAttention: (
        _Field("kv_heads", "KV heads", "num_kv_heads", COUNTS),
        _Field("head_dim", "attention head dim", "head_dim", HEAD_DIMS),
    ),
    LatentAttention: (_Field("latent_dim", "latent dim of KV", "latent_dim", LATENT_DIMS),),
    GatedDeltaNet: (
        _Field(_HEADS, "linear heads", "num_value_heads", COUNTS, tied="num_key_heads"),
        _Field(_KEYS, "linear key dim", "key_dim", HEAD_DIMS),
        _Field(_VALUES, "linear value dim", "value_dim", HEAD_DIMS),
    ),
    KimiDelta: (
        _Field(_HEADS, "linear heads", "num_heads", COUNTS),
        _Field(_KEYS, "linear key dim", "key_dim", HEAD_DIMS),
        _Field(_VALUES, "linear value dim", "value_dim", HEAD_DIMS),
    ),
    Lightning: (
        _Field(_HEADS, "linear heads", "num_heads", COUNTS),
        _Field(_KEYS, "linear head dim", "head_dim", HEAD_DIMS),
    ),
    Mamba2: (
        _Field(_HEADS, "linear heads", "num_heads", COUNTS),
        _Field(_KEYS, "state size of a channel", "state_dim", STATE_DIMS),
        _Field(_VALUES, "linear head dim", "head_dim", HEAD_DIMS),
    ),
    Mamba1: (
        _Field("channels", "linear channels", "inner", CHANNELS),
        _Field(_KEYS, "state size of a channel", "state_dim", STATE_DIMS),
    ),
    ShortConv: (_Field("channels", "convolution channels", "channels", CHANNELS),),
}

NAMES = (LAYERS, FULL_SHARE, *dict.fromkeys(f.name for fields in _FIELDS.values() for f in fields))
"""Every dial that some model has."""


def dials_of(spec: ModelSpec) -> tuple[Dial, ...]:
    """The dials that this model has. A share of full attention needs a layer of each kind to copy."""
    count = len(spec.layers)
    dials = [Dial(LAYERS, "layers", count, _with(range(1, MOST_LAYERS + 1), count))]
    if _both_kinds(spec):
        share = 100 * _full(spec) / len(_mixing(spec))
        dials.append(Dial(FULL_SHARE, "share of full attention", share, _with(SHARES, share)))
    seen = {dial.name for dial in dials}
    for mixer in _parts(spec):
        for field in _FIELDS.get(type(mixer), ()):
            if field.name not in seen:
                seen.add(field.name)
                value = getattr(mixer, field.attribute)
                dials.append(Dial(field.name, field.label, value, _values(field, mixer)))
    return tuple(dials)


def turned(spec: ModelSpec, changes: Mapping[str, float]) -> ModelSpec:
    """`spec` with these dials at these values. More or fewer layers repeat the model's own from the first;
    another share of full attention spreads copies of its first full layer's mixer evenly.

    Raises ConfigError for a dial that the model lacks, and for a value that the dial does not take.
    """
    dials = {dial.name: dial for dial in dials_of(spec)}
    for name, value in changes.items():
        if name not in dials:
            raise ConfigError(f"{name} is no dim of this model; it has {', '.join(dials)}")
        if value not in dials[name].values:
            raise ConfigError(f"{name} is {value:g}; choose one of {_choices(dials[name].values)}")
    layers = spec.layers
    if LAYERS in changes:
        layers = tuple(layers[i % len(layers)] for i in range(int(changes[LAYERS])))
    if FULL_SHARE in changes and changes[FULL_SHARE] != dials[FULL_SHARE].value:
        layers = _shared_out(spec, layers, changes[FULL_SHARE])
    dims = {name: int(value) for name, value in changes.items() if name not in (LAYERS, FULL_SHARE)}
    return replace(
        spec,
        layers=tuple(replace(layer, mixer=_turned(layer.mixer, dims)) for layer in layers),
        mtp_layers=tuple(replace(layer, mixer=_turned(layer.mixer, dims)) for layer in spec.mtp_layers),
    )


def _shared_out(spec: ModelSpec, layers: tuple[Layer, ...], percent: float) -> tuple[Layer, ...]:
    """These layers with `percent` of their mixers full attention; networks stay where they are."""
    full = next(m for m in _mixing(spec) if m.kv_elements())
    linear = next(m for m in _mixing(spec) if not m.kv_elements())
    places = [i for i, layer in enumerate(layers) if not isinstance(layer.mixer, NoMixer)]
    wanted = round(percent / 100 * len(places))
    chosen = {i: ((n + 1) * wanted // len(places) > n * wanted // len(places)) for n, i in enumerate(places)}
    return tuple(
        replace(layer, mixer=full if chosen[i] else linear) if i in chosen else layer
        for i, layer in enumerate(layers)
    )


def _turned(mixer: Mixer, dims: Mapping[str, int]) -> Mixer:
    if isinstance(mixer, Parallel):
        attention, linear = _turned(mixer.attention, dims), _turned(mixer.linear, dims)
        assert isinstance(attention, FullAttention)
        return replace(mixer, attention=attention, linear=linear)
    values: dict[str, int] = {}
    for field in _FIELDS.get(type(mixer), ()):
        if field.name in dims:
            values[field.attribute] = dims[field.name]
            if field.tied:
                ratio = getattr(mixer, field.attribute) // getattr(mixer, field.tied)
                values[field.tied] = dims[field.name] // ratio
    return replace(mixer, **values) if values else mixer  # type: ignore[type-var]


def _values(field: _Field, mixer: Mixer) -> tuple[float, ...]:
    """What the field can be: KV heads divide the attention heads, tied fields stay whole."""
    values: list[int] = list(field.values)
    if isinstance(mixer, FullAttention) and field.attribute == "num_kv_heads":
        values = [n for n in range(1, mixer.num_heads + 1) if mixer.num_heads % n == 0]
    if field.tied:
        ratio = getattr(mixer, field.attribute) // getattr(mixer, field.tied)
        values = [n for n in values if n % ratio == 0]
    return _with(values, getattr(mixer, field.attribute))


def _choices(values: tuple[float, ...]) -> str:
    """As people read them; of three or more in a row the first and the last: "1 to 128"."""
    parts = []
    for _, row in groupby(enumerate(values), lambda place: place[1] - place[0]):
        run = [f"{value:g}" for _, value in row]
        parts += run if len(run) < 3 else [f"{run[0]} to {run[-1]}"]
    return ", ".join(parts)


def _with(values: tuple[int, ...] | list[int] | range, own: float) -> tuple[float, ...]:
    return tuple(sorted({*values, own}))


def _mixing(spec: ModelSpec) -> list[Mixer]:
    return [layer.mixer for layer in spec.layers if not isinstance(layer.mixer, NoMixer)]


def _full(spec: ModelSpec) -> int:
    return sum(mixer.kv_elements() > 0 for mixer in _mixing(spec))


def _both_kinds(spec: ModelSpec) -> bool:
    """Some layers attend, others do not, and none does both."""
    side_by_side = any(isinstance(mixer, Parallel) for mixer in _mixing(spec))
    return not side_by_side and 0 < _full(spec) < len(_mixing(spec))


def _parts(spec: ModelSpec) -> list[Mixer]:
    """Mixers in the model's order, those that stand side by side one after the other."""
    parts: list[Mixer] = []
    for mixer in _mixing(spec):
        parts += [mixer.attention, mixer.linear] if isinstance(mixer, Parallel) else [mixer]
    return parts
