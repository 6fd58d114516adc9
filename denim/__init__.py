"""Denim: an inference engine for hybrid linear-attention language models.

Owns the public names. They load on first use, so that `import denim` and the parts without tensors
(`denim.spec`, `denim.ledger`) start without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from denim.engine import LLM, AsyncEngine
    from denim.errors import CapacityError, CheckpointError, ConfigError, DenimError, RequestError
    from denim.sampling_params import SamplingParams
    from denim.structured_output import StructuredOutput

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngine",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "DenimError",
    "RequestError",
    "SamplingParams",
    "StructuredOutput",
    "__version__",
]

_HOMES = {
    "LLM": "denim.engine",
    "AsyncEngine": "denim.engine",
    "CapacityError": "denim.errors",
    "CheckpointError": "denim.errors",
    "ConfigError": "denim.errors",
    "DenimError": "denim.errors",
    "RequestError": "denim.errors",
    "SamplingParams": "denim.sampling_params",
    "StructuredOutput": "denim.structured_output",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'denim' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
