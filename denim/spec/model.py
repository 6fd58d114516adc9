"""The frozen description of a model from which everything else is derived.

Owns the model as a whole: its layers in order and what surrounds them. A layer is a mixer
(`denim.spec.mixers`) and a feed-forward network (`denim.spec.ffn`). Knows nothing of files, tensors or
devices: a reader (`denim.spec.reader`) makes a `ModelSpec` from a config, and ledger, arena, scheduler and
models read it.

Dtypes are the names that torch and safetensors use ("float32", "bfloat16", "float16", "float8_e4m3fn").
"""

from __future__ import annotations

from dataclasses import dataclass

from denim.spec.ffn import FFN
from denim.spec.mixers import Mixer

MAX_POSITION_WITHOUT_POSITIONS = 1 << 20
"""`max_position` of a model that knows no positions and whose config names no longest sequence: such a model
has no bound of its own, but tables and admission need one."""


@dataclass(frozen=True)
class Layer:
    mixer: Mixer
    ffn: FFN


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding. `kind` is "default" or "yarn"; the rest below `theta` is YaRN's.

    YaRN: Peng et al. 2023 (arXiv 2309.00071). `attention_factor` None means 0.1 ln(factor) + 1.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class ModelSpec:
    """A language model as an ordered tuple of layers, with all that surrounds them.

    `mtp_layers` are the layers of the multi-token-prediction head (empty: none promised by the config).
    `dtype` is that of weights, activations and KV; `state_dtype` that of recurrent states. `rope` None: no
    positions are turned. `details`: a frozen dataclass of the family's own (multipliers, kinds of norms),
    made by its reader and read by its model file alone. `weight_blocks`: rows and columns of a block of FP8
    weights that share one scale in the files (None: not quantised); where the device cannot multiply them as
    they are, weights in memory are `dtype`.
    """

    family: str
    hidden_size: int
    vocab_size: int
    layers: tuple[Layer, ...]
    rope: Rope | None
    norm_eps: float
    tie_embeddings: bool
    max_position: int
    dtype: str = "bfloat16"
    state_dtype: str = "float32"
    mtp_layers: tuple[Layer, ...] = ()
    details: object = None
    weight_blocks: tuple[int, int] | None = None

    @property
    def pattern(self) -> str:
        """One letter a layer, such as "LLLF"."""
        return "".join(layer.mixer.letter for layer in self.layers)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers that keep KV."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.mixer.kv_elements())

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Indices of the layers that keep a fixed-size state."""
        return tuple(
            i
            for i, layer in enumerate(self.layers)
            if layer.mixer.state_tensors(self.state_dtype, self.dtype)
        )
