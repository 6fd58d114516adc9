"""What one of N devices holds of a model whose layers are cut across them: again a model spec.

Owns the cut, after Megatron-LM (arXiv 1909.08053): heads, channels, intermediates and vocabulary are divided;
KV heads and groups of B and C are repeated where there are fewer than devices; latents, routers and norms are
whole on every device. So the ledger of a share is the ledger of its spec. Communication is not counted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from denim.errors import ConfigError
from denim.spec.attention import FullAttention, LatentAttention
from denim.spec.families.zamba2 import SharedAttention
from denim.spec.ffn import FFN, DenseFFN, MoEFFN
from denim.spec.linear import GatedDeltaNet, KimiDelta, Lightning, Mamba1, Mamba2, ShortConv
from denim.spec.mixers import Mixer
from denim.spec.model import Layer, ModelSpec
from denim.spec.parallel import Parallel

P = TypeVar("P", bound=Parallel)


def share_of(spec: ModelSpec, devices: int) -> ModelSpec:
    """The share of each of `devices` devices. Raises ConfigError when heads do not divide."""
    if devices < 1:
        raise ConfigError(f"--tensor-parallel is {devices}; it must be 1 or more")
    if devices == 1:
        return spec
    return replace(
        spec,
        layers=tuple(_layer(layer, devices) for layer in spec.layers),
        mtp_layers=tuple(_layer(layer, devices) for layer in spec.mtp_layers),
        vocab_size=-(-spec.vocab_size // devices),
    )


def _layer(layer: Layer, n: int) -> Layer:
    return Layer(_mixer(layer.mixer, n), _ffn(layer.ffn, n))


def _mixer(mixer: Mixer, n: int) -> Mixer:
    match mixer:
        case FullAttention():
            heads = _divided("attention heads", mixer.num_heads, n)
            return replace(mixer, num_heads=heads, num_kv_heads=_repeated("KV heads", mixer.num_kv_heads, n))
        case LatentAttention():
            return replace(mixer, num_heads=_divided("attention heads", mixer.num_heads, n))
        case GatedDeltaNet():
            keys = _divided("linear key heads", mixer.num_key_heads, n)
            return replace(mixer, num_key_heads=keys, num_value_heads=mixer.num_value_heads // n)
        case KimiDelta() | Lightning():
            return replace(mixer, num_heads=_divided("linear heads", mixer.num_heads, n))
        case Mamba2():
            heads = _divided("Mamba2 heads", mixer.num_heads, n)
            return replace(mixer, num_heads=heads, num_groups=_repeated("groups", mixer.num_groups, n))
        case Mamba1():
            return replace(mixer, inner=_divided("Mamba1 channels", mixer.inner, n))
        case ShortConv():
            return replace(mixer, channels=_divided("convolution channels", mixer.channels, n))
        case SharedAttention():
            return replace(_both(mixer, n), intermediate=-(-mixer.intermediate // n))
        case Parallel():
            return _both(mixer, n)
    return mixer


def _both(mixer: P, n: int) -> P:
    attention = _mixer(mixer.attention, n)
    assert isinstance(attention, FullAttention)
    return replace(mixer, attention=attention, linear=_mixer(mixer.linear, n))


def _ffn(ffn: FFN, n: int) -> FFN:
    match ffn:
        case DenseFFN():
            return replace(ffn, intermediate=-(-ffn.intermediate // n))
        case MoEFFN():
            shared = -(-ffn.shared_intermediate // n)
            return replace(ffn, intermediate=-(-ffn.intermediate // n), shared_intermediate=shared)
    return ffn


def _divided(what: str, count: int, n: int) -> int:
    if count % n:
        raise _indivisible(n, count, what)
    return count // n


def _repeated(what: str, count: int, n: int) -> int:
    """Where there are fewer than devices, each device has a whole one, and some have the same."""
    if count % n and n % count:
        raise _indivisible(n, count, what)
    return max(1, count // n)


def _indivisible(n: int, count: int, what: str) -> ConfigError:
    return ConfigError(
        f"--tensor-parallel is {n}, which does not divide this model's {count} {what}; give a divisor"
    )
