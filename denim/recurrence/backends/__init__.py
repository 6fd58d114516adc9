"""Prefill of the gated delta rule in other libraries.

Each file is one library: `run` takes a `packed.Packed` and imports the library when it is asked to; LOG_DECAY
says in which form it takes the decay. `packed.through` is the way there and back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module

from torch import Tensor

from denim.recurrence.backend import FLA, FLASHINFER, FLASHQLA

MODULES = {FLASHINFER: "flashinfer", FLASHQLA: "flashqla", FLA: "fla"}


def gated_delta_by(peer: str) -> Callable[..., Tensor]:
    """`packed.through` with the library behind a name of `backend.PEERS`."""
    from denim.recurrence.backends.packed import through

    library = import_module(f"{__name__}.{MODULES[peer]}")
    return partial(through, library.run, log_decay=library.LOG_DECAY)
