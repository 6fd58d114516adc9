"""Prefill of the gated delta rule in other libraries.

Each file is one library: `run` takes a `packed.Packed` and imports the library when it is asked to; LOG_DECAY
says in which form it takes the decay; `has_kernels`, where there is one, whether the library is whole.
`packed.through` is the way there and back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType

from torch import Tensor

from denim.recurrence.backend import FLA, FLASHINFER, FLASHQLA

MODULES = {FLASHINFER: "flashinfer", FLASHQLA: "flashqla", FLA: "fla"}


def gated_delta_by(peer: str) -> Callable[..., Tensor]:
    """`packed.through` with the library behind a name of `backend.PEERS`."""
    from denim.recurrence.backends.packed import through

    library = _library(peer)
    return partial(through, library.run, log_decay=library.LOG_DECAY)


def has_kernels(peer: str) -> bool:
    """Whether an installed library has the kernels of this rule. Imports it where nothing else tells."""
    check = getattr(_library(peer), "has_kernels", None)
    return check is None or check()


def _library(peer: str) -> ModuleType:
    return import_module(f"{__name__}.{MODULES[peer]}")
