"""What a user can set when the engine starts.

Owns names, defaults and validation; everything behind it may trust the values. An option that this
version cannot honour is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from denim.cache.positions import POLICIES
from denim.engine.changing_lines import ChangingLines
from denim.errors import ConfigError
from denim.layers.paged_attention import BACKENDS
from denim.ledger.deferred import LONGEST
from denim.ledger.units import parse_bytes
from denim.memory.checkpoint_form import CHECKPOINT_DTYPES
from denim.recurrence.backend import WISHES
from denim.spec.config_file import embedded_model

DTYPES = ("auto", "float32", "bfloat16", "float16")
# Names of KV in 8 bits, vLLM's among them: e4m3, which holds numbers up to 448 with 4 digits of binary.
FP8_NAMES = ("fp8", "fp8_e4m3", "float8_e4m3fn")

# A page is the unit of KV memory, and the matrices inside a chunk grow with its square: beyond these, both
# only cost.
LIMITS = {"page_size": 4096, "chunk_size": 512}

# Options of the stable interface whose feature has not landed, with the one value that is right without it.
NOT_YET = {
    "speculative": (None, "there is no speculation"),
    "deterministic": (False, "logits are not bit-equal across batches"),
    "tensor_parallel_size": (1, "one device is used"),
}


@dataclass(frozen=True)
class EngineOptions:
    """Options of `LLM` and `AsyncEngine`.

    model: a Hugging Face folder; None: the embedded denim-tiny.
    device: "auto" (CUDA where there is one), "cpu", "cuda", "cuda:1", …
    dtype: of weights, activations and, with kv_dtype "auto", KV. "auto": the config's.
    kv_dtype: of keys and values in pages; "fp8" halves them. Numbers are kept as they are, without scales (as
        vLLM does by default): keys behind a norm and values lie well inside e4m3's range; beyond it they
        become 448.
    state_dtype: of recurrent states; "auto": the config's mamba_ssm_dtype or float32.
    memory: the arena: bytes, "8GiB", or a fraction of the device, which counts the whole device, weights
        included. None: as much as max_num_seqs requests of max_model_len could use, at most a quarter of
        the free host memory, or 0.9 of a CUDA device.
    max_model_len: tokens of prompt and output; None: the model's own limit, or what fits the arena.
    max_num_seqs: requests that run at once, clamped to the slots that fit.
    max_num_batched_tokens: tokens of one step, prefill and decode together.
    page_size: tokens of a KV page. chunk_size: tokens of a chunk of the linear layers' prefill.
    swap_space: host memory for preempted requests; beyond it they are computed again.
    async_scheduling: plan and start a step before the outcome of the last one is known, so that the host's
        work hides behind the device's. None: where there is a CUDA device.
    enforce_eager: no captured graphs of decode steps, which a CUDA device has otherwise.
    attention_backend: who attends over pages on a CUDA device: "flashinfer", "triton" or "torch"; "auto"
        takes the best that is there.
    recurrence_backend: in which form the linear layers' rules run: "triton" or "torch"; "flashinfer",
        "flashqla" or "fla" for the prefill of Gated DeltaNet, what they cannot do staying with Triton; "auto"
        takes the fastest.
    deferred_writes: decode steps of delta rules (Gated DeltaNet, KDA) record their updates and write a state
        every so many steps: fewer bytes for many requests at once, larger slots. "auto": as many steps as the
        ledger says, where many requests may run on a CUDA device and their larger slots fit; steps of few
        rows write all the same. None: every step writes.
    checkpoint_policy: which prefixes are kept for later requests: "none"; "ends" of prompt and generation;
        "auto": ends, what the chat template shares with the next turn, where requests part, and what requests
        ask for; "align" and "all": fixed blocks, as other engines do.
    host_memory: host memory for checkpoints that leave the arena, and the pages before them; pinned with a
        CUDA device. 0: they are gone.
    disk_cache: a directory; what goes to host memory is written there behind it, and found again after a
        restart. It belongs to one model and layout, and to one engine at a time. None: no files.
    disk_space: the most that its files may take.
    checkpoint_dtype: of recurrent states in checkpoints that left the arena: "bfloat16" or "int8" take less
        memory and are not exact; "auto": as they are.
    strip_lines: regular expressions; lines of system messages in which one is found are left out of chats: a
        value that changes with every request would end all reuse behind it.
    debug: freed slots and pages are filled with NaN, and invariants are checked after every step.
    """

    model: str | Path | None = None
    device: str = "auto"
    dtype: str = "auto"
    state_dtype: str = "auto"
    memory: int | float | str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_dtype: str = "auto"
    checkpoint_dtype: str = "auto"
    host_memory: int | str = 0
    disk_cache: str | Path | None = None
    disk_space: int | str = "16GiB"
    page_size: int = 16
    chunk_size: int = 64
    async_scheduling: bool | None = None
    enforce_eager: bool = False
    attention_backend: str = "auto"
    recurrence_backend: str = "auto"
    deferred_writes: int | str | None = "auto"
    tensor_parallel_size: int = 1
    checkpoint_policy: str = "auto"
    speculative: dict[str, Any] | None = None
    deterministic: bool = False
    seed: int = 0
    swap_space: int | str = "4GiB"
    strip_lines: Sequence[str] = ()
    debug: bool = False

    def __post_init__(self) -> None:
        for name, (value, why) in NOT_YET.items():
            given = getattr(self, name)
            if given != value or isinstance(given, bool) != isinstance(value, bool):
                raise ConfigError(
                    f"{name}={given!r} is not supported in this version, in which {why};"
                    f" leave it at {value!r}"
                )
        for name in ("dtype", "state_dtype", "kv_dtype"):
            supported = DTYPES + FP8_NAMES if name == "kv_dtype" else DTYPES
            if getattr(self, name) not in supported:
                raise ConfigError(f"{name}={getattr(self, name)!r}; supported: {', '.join(supported)}")
        for name, known in (
            ("attention_backend", BACKENDS),
            ("recurrence_backend", WISHES),
            ("checkpoint_policy", tuple(POLICIES)),
            ("checkpoint_dtype", CHECKPOINT_DTYPES),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name}={getattr(self, name)!r}; supported: {', '.join(known)}")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "page_size", "chunk_size"):
            value = getattr(self, name)
            may_be_none = name.startswith("max_")
            if value is None and may_be_none:
                continue
            if not _is_int(value) or value < 1:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least 1")
            if value > LIMITS.get(name, value):
                raise ConfigError(f"{name}={value!r} is too large; at most {LIMITS[name]}")
        steps = self.deferred_writes
        if steps not in (None, "auto") and not (_is_int(steps) and 2 <= int(steps) <= LONGEST):
            raise ConfigError(
                f"deferred_writes={steps!r} must be 'auto', None or a number of steps from 2 to {LONGEST}"
            )
        if not _is_int(self.seed):
            raise ConfigError(f"seed={self.seed!r} must be a whole number")
        if self.async_scheduling not in (None, True, False):
            raise ConfigError(f"async_scheduling={self.async_scheduling!r} must be True, False or None")
        for name in ("enforce_eager", "debug"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be True or False")
        if self.model is not None and (not isinstance(self.model, str | Path) or not str(self.model)):
            raise ConfigError(
                f"model={self.model!r} must be the path of a model folder, or None for denim-tiny"
            )
        if isinstance(self.strip_lines, str) or not isinstance(self.strip_lines, Sequence):
            raise ConfigError(f"strip_lines={self.strip_lines!r} must be a list of regular expressions")
        ChangingLines(self.strip_lines)
        parse_bytes("swap_space", self.swap_space)
        parse_bytes("disk_space", self.disk_space)
        host_memory = parse_bytes("host_memory", self.host_memory)
        if self.disk_cache is not None:
            if not isinstance(self.disk_cache, str | Path) or not str(self.disk_cache):
                raise ConfigError(f"disk_cache={self.disk_cache!r} must be the path of a directory, or None")
            if not host_memory or self.checkpoint_policy == "none":
                raise ConfigError(
                    f"disk_cache={str(self.disk_cache)!r} needs host_memory, through which prefixes come and"
                    ' go, and a checkpoint_policy other than "none"; set them, or leave disk_cache out'
                )
        if isinstance(self.memory, float):
            if not 0 < self.memory <= 1:
                raise ConfigError(
                    f"memory={self.memory!r}: a fraction of the device must lie above 0 and be at most 1; "
                    "give one, or bytes with KiB, MiB, GiB or TiB such as '8GiB'"
                )
        elif self.memory is not None:
            parse_bytes("memory", self.memory)

    @property
    def folder(self) -> Path:
        """The model's."""
        return embedded_model() if self.model is None else Path(self.model).expanduser()

    @property
    def kept_kv_dtype(self) -> str | None:
        """The layout's name of `kv_dtype`; None: the model's dtype."""
        if self.kv_dtype == "auto":
            return None
        return "float8_e4m3fn" if self.kv_dtype in FP8_NAMES else self.kv_dtype

    @classmethod
    def of(cls, **given: Any) -> EngineOptions:
        """From keyword arguments; an unknown name gets an error that lists the known ones."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(given.keys() - set(known))
        if unknown:
            raise ConfigError(f"unknown option {unknown[0]!r}; known: {', '.join(known)}")
        return cls(**given)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
