"""The tiers below the device's: their memory, and their books over one prefix cache.

Owns the step from options to tiers. The memory is made once; books are opened anew whenever the engine's are.
"""

from __future__ import annotations

from denim.cache.lower_tiers import LowerTiers, Sources
from denim.cache.prefix_cache import PrefixCache
from denim.cache.sizing import open_tier, prefill_curve
from denim.engine.options import EngineOptions
from denim.ledger.reload import HOST, reload_rule
from denim.ledger.units import parse_bytes, size_text
from denim.memory.checkpoint_form import CheckpointForm
from denim.memory.host_memory import HostMemory
from denim.memory.layout import ArenaLayout
from denim.memory.storage import Storage
from denim.spec.model import ModelSpec


class PrefixTiers:
    """`form`: how checkpoints lie there. Raises CapacityError when the host has not that much memory."""

    def __init__(
        self, options: EngineOptions, spec: ModelSpec, layout: ArenaLayout, storage: Storage
    ) -> None:
        self.form = CheckpointForm.of(layout, options.checkpoint_dtype)
        self.host_bytes = parse_bytes("host_memory", options.host_memory)
        self.memory = HostMemory(self.form, self.host_bytes, storage, options.debug)
        self._spec = spec
        self._chunk = options.chunk_size
        self._device_type = storage.buffer.device.type

    def open(self, cache: PrefixCache, sources: Sources) -> LowerTiers:
        """Empty books below `cache`."""
        self.memory.reset()
        blocks = self.memory.num_blocks * self.form.block_bytes
        host = open_tier(HOST, self._spec, self.form, blocks, self.memory.free, self._chunk)
        pays = reload_rule(prefill_curve(self._spec, self._chunk), self._device_type)
        return LowerTiers(cache, host, self.memory, pays, sources)

    def describe(self, tokens: int) -> str:
        """What the start-up line says of them, in prefixes of `tokens` tokens."""
        held = self.memory.num_blocks * self.form.block_bytes // self.form.checkpoint_bytes(tokens)
        kept = "" if not self.form.tensors else f", states in {self.form.dtype}"
        return f"{size_text(self.host_bytes)} of host memory hold {held:,} more of {tokens:,} tokens{kept}"
