"""The tiers below the device's: their memory, and their books over one prefix cache.

Owns the step from options to tiers. Memory, files and threads are made once; books are opened anew whenever
the engine's are.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from denim.cache.disk_tier import DiskTier
from denim.cache.lower_tiers import LowerTiers, Sources
from denim.cache.prefix_cache import PrefixCache
from denim.cache.sizing import open_tier, prefill_curve
from denim.engine.model_identity import prefix_identity
from denim.engine.options import EngineOptions
from denim.errors import CapacityError
from denim.ledger.reload import DISK, HOST, reload_rule
from denim.ledger.units import parse_bytes, size_text
from denim.memory.checkpoint_form import CheckpointForm
from denim.memory.host_memory import HostMemory
from denim.memory.layout import ArenaLayout
from denim.memory.prefix_files import PrefixFiles
from denim.memory.storage import Storage
from denim.spec.model import ModelSpec

THREADS = 3
"""One for what is written (`denim.cache.disk_tier`), and two that read beside it."""


class PrefixTiers:
    """`form`: how checkpoints lie there. Raises CapacityError when the host has not that much memory, and
    ConfigError when the directory of files cannot be used."""

    def __init__(
        self,
        options: EngineOptions,
        spec: ModelSpec,
        model: Any,
        layout: ArenaLayout,
        storage: Storage,
    ) -> None:
        self.form = CheckpointForm.of(layout, options.checkpoint_dtype)
        self.host_bytes = parse_bytes("host_memory", options.host_memory)
        self.disk_bytes = parse_bytes("disk_space", options.disk_space)
        _require("host_memory", self.host_bytes, self.form)
        if options.disk_cache is not None:
            _require("disk_space", self.disk_bytes, self.form)
        self._spec = spec
        self._chunk = options.chunk_size
        self._device_type = storage.buffer.device.type
        self.memory = HostMemory(self.form, self.host_bytes, storage, options.debug)
        # Behind all that may fail, so that who tries again does not find the directory in use.
        self._files: PrefixFiles | None = None
        if options.disk_cache is not None:
            directory = Path(options.disk_cache).expanduser()
            self._files = PrefixFiles(directory, prefix_identity(options, spec, model, layout, self.form))
        self._threads = ThreadPoolExecutor(THREADS, "denim-disk")
        self._disk: DiskTier | None = None

    def open(self, cache: PrefixCache, sources: Sources) -> LowerTiers:
        """Books below `cache`: empty ones of host memory, and of files those that are there."""
        if self._disk is not None:
            self._disk.finish()
        self.memory.reset()
        host = open_tier(HOST, self._spec, self.form, self._host_capacity, self.memory.free, self._chunk)
        if self._files is not None:
            self._disk = DiskTier(
                self._files,
                self.disk_bytes,
                lambda on_free, has_room: open_tier(
                    DISK,
                    self._spec,
                    self.form,
                    self.disk_bytes,
                    on_free,
                    self._chunk,
                    has_room=has_room,
                ),
                host,
                self.memory,
                self._threads,
            )
        pays = reload_rule(prefill_curve(self._spec, self._chunk), self._device_type)
        return LowerTiers(cache, host, self.memory, pays, sources, self._disk)

    @property
    def has_files(self) -> bool:
        return self._files is not None

    def close(self) -> None:
        """End the threads, once they have done what they were given, and let go of memory and files."""
        if self._disk is not None:
            self._disk.finish()
        self._threads.shutdown()
        self.memory.close()
        if self._files is not None:
            self._files.close()

    def describe(self, tokens: int) -> str:
        """What the start-up line says of them, in prefixes of up to `tokens` tokens."""
        each = self.form.checkpoint_bytes(tokens)
        kept = f", states in {self.form.dtype}" if self.form.tensors else ""
        text = (
            f"{size_text(self.host_bytes)} of host memory hold {self._host_capacity // each:,} more of"
            f" {tokens:,} tokens{kept}"
        )
        if self._disk is None:
            return text
        stats = self._disk.stats()
        return (
            f"{text}; {size_text(self.disk_bytes)} of files {self.disk_bytes // each:,},"
            f" of which {stats['checkpoints']:,} checkpoints in {size_text(stats['used_bytes'])} are there"
        )

    @property
    def _host_capacity(self) -> int:
        return self.memory.num_blocks * self.form.block_bytes


def _require(name: str, nbytes: int, form: CheckpointForm) -> None:
    """Raises CapacityError where not one checkpoint can ever lie there."""
    least = form.checkpoint_bytes(1)
    if nbytes < least:
        raise CapacityError(
            f"{name}={size_text(nbytes)} holds no checkpoint of this model, the smallest of which takes"
            f" {size_text(least)}; raise it, or leave it out"
        )
