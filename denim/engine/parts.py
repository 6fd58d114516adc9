"""What one engine is made of: a model and its memory for good, and books over them that may be opened anew.

Owns how the parts are put together as options say, and what is told of them: the facts and the start-up line.
Runs nothing, and knows no request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from denim.cache.prefix_cache import HasRoom, PrefixCache
from denim.cache.sizing import open_cache, why_never
from denim.engine.capacity import describe
from denim.engine.facts import EngineFacts
from denim.engine.loading import LoadedModel
from denim.engine.memory_plan import plan_memory
from denim.engine.options import EngineOptions
from denim.engine.prefix_tiers import PrefixTiers
from denim.layers.paged_attention import StepLimits
from denim.ledger.preemption import recompute_rule
from denim.ledger.units import parse_bytes
from denim.memory.arena import Arena
from denim.memory.layout import PAGE, SLOT
from denim.memory.storage import Storage
from denim.memory.swap import SwapSpace
from denim.runner.forward import Forward
from denim.runner.runner import Runner
from denim.scheduler.config import SchedulerConfig
from denim.scheduler.scheduler import Scheduler

log = logging.getLogger("denim")


class Books(NamedTuple):
    """Who holds what, who runs next, and who carries it out."""

    arena: Arena
    swap: SwapSpace
    scheduler: Scheduler
    runner: Runner


class Parts:
    """`tiers` None: there are none below the device's. Raises ConfigError or CapacityError."""

    def __init__(self, options: EngineOptions, loaded: LoadedModel) -> None:
        self.options = options
        self.loaded = loaded
        spec, device = loaded.spec, loaded.device
        self.layout, self.capacity = plan_memory(options, spec, device)
        capacity = self.capacity
        self.storage = Storage(self.layout, capacity.num_slabs, device, debug_poison=options.debug)
        rows = capacity.max_num_seqs
        limits = StepLimits(
            spans=rows,
            tokens=capacity.max_num_batched_tokens,
            pages=rows * self.layout.need(capacity.max_model_len).get(PAGE, 0),
        )
        self.tiers: PrefixTiers | None = None
        if options.checkpoint_policy != "none" and parse_bytes("host_memory", options.host_memory):
            self.tiers = PrefixTiers(options, spec, loaded.model, self.layout, self.storage)
        self.forward = Forward(
            loaded.model,
            self.storage,
            limits,
            attention=options.attention_backend,
            eager=options.enforce_eager,
        )

    def open_books(self) -> Books:
        """Empty ones. The bytes of the arena stay where they are."""
        capacity, options, tiers = self.capacity, self.options, self.tiers
        config = SchedulerConfig(
            chunk_size=options.chunk_size,
            max_num_seqs=capacity.max_num_seqs,
            max_num_batched_tokens=capacity.max_num_batched_tokens,
            max_model_len=capacity.max_model_len,
            max_prefill_spans=self.forward.most_prefill_spans,
        )
        arena = Arena(self.layout, capacity.num_slabs, self.storage.retire if options.debug else None)
        swap = SwapSpace(parse_bytes("swap_space", options.swap_space))
        scheduler = Scheduler(
            config,
            arena,
            swap,
            recompute_rule(self.loaded.spec, self.layout.request_bytes, self.loaded.device.type),
            self._cache_over(arena),
            self.forward.saves_inside,
            None if tiers is None else tiers.open,
        )
        runner = Runner(self.forward, arena, swap, None if tiers is None else tiers.memory)
        return Books(arena, swap, scheduler, runner)

    def _cache_over(self, arena: Arena) -> Callable[[HasRoom], PrefixCache] | None:
        policy, chunk = self.options.checkpoint_policy, self.options.chunk_size
        if policy == "none":
            return None
        spec, segment = self.loaded.spec, self.capacity.max_num_batched_tokens
        return lambda has_room: open_cache(spec, arena, has_room, policy, segment, chunk)

    def facts(self) -> EngineFacts:
        """What stays the same while the engine runs."""
        capacity, layout, spec = self.capacity, self.layout, self.loaded.spec
        entry_bytes = {entry.name: entry.entry_bytes for entry in layout.classes}
        return EngineFacts(
            model=self.loaded.name,
            device=str(self.loaded.device),
            dtype=spec.dtype,
            vocab_size=spec.vocab_size,
            end_token_ids=self.loaded.defaults.end_token_ids,
            max_model_len=capacity.max_model_len,
            max_num_seqs=capacity.max_num_seqs,
            max_num_batched_tokens=capacity.max_num_batched_tokens,
            page_size=layout.page_size,
            chunk_size=self.options.chunk_size,
            checkpoint_policy=self.options.checkpoint_policy,
            strip_lines=tuple(self.options.strip_lines),
            weight_bytes=capacity.weight_bytes,
            arena_bytes=capacity.num_slabs * layout.slab_bytes,
            slot_bytes=entry_bytes.get(SLOT, 0),
            page_bytes=entry_bytes.get(PAGE, 0),
        )

    def log_start(self) -> None:
        """The start-up line, once books are open; and a warning where the cache can be of no use."""
        capacity, policy = self.capacity, self.options.checkpoint_policy
        line = describe(self.loaded.spec, self.layout, capacity, policy)
        if self.tiers is not None:
            line += f"; {self.tiers.describe(capacity.max_model_len)}"
        log.info("%s on %s: %s", self.loaded.name, self.loaded.device, line)
        chunk, longest = self.options.chunk_size, capacity.max_model_len
        reason = why_never(self.layout, capacity.num_slabs, policy, chunk, longest)
        if reason is not None:
            log.warning("prefixes can never be reused: %s", reason)
