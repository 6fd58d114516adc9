"""What fits on a device before there is one: the arena, and how many requests of a workload it holds.

Owns the plan. Sizes come from the ledger, counts by slabs from the same layout and the same search that the
engine uses, so that plan and engine cannot disagree. Pure Python: never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from denim.errors import CapacityError, ConfigError
from denim.ledger.budget import DEFAULT_BATCHED_TOKENS, DEFAULT_NUM_SEQS, arena_budget, working_bytes
from denim.ledger.cost import Ledger, ledger_of
from denim.ledger.devices import Device
from denim.ledger.drafts import DraftCost, draft_cost
from denim.ledger.flops import CHUNK
from denim.ledger.lengths import Lengths
from denim.ledger.parameters import weight_bytes
from denim.ledger.tensor_parallel import share_of
from denim.ledger.units import size_text
from denim.memory.checkpoint_form import CHECKPOINT_DTYPES, EXACT, CheckpointForm
from denim.memory.fit import mixture_need, mixture_that_fits
from denim.memory.layout import PAGE, SLOT, TENSOR_ALIGN, ArenaLayout, smallest_slab
from denim.spec.model import ModelSpec

PAGE_SIZE = 16  # tokens; the engine's default
MOST_DRAFTED = min(DEFAULT_BATCHED_TOKENS.values())  # a step that verifies drafts applies one token more


@dataclass(frozen=True)
class CapacityPlan:
    """One model on one device, or on one of several that share it: then every number is a device's own.

    `spec` is the device's share, `ledger` its costs. `working_bytes` is what a step needs beside the arena.
    `form` is that of checkpoints in `host_bytes` of host memory.
    """

    spec: ModelSpec
    ledger: Ledger
    layout: ArenaLayout
    device: Device
    kv_dtype: str
    weight_bytes: int
    working_bytes: int
    num_slabs: int
    drafts: DraftCost | None
    chunk: int
    form: CheckpointForm
    host_bytes: int

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        device: Device,
        *,
        memory: int | float | None = None,
        devices: int = 1,
        kv_dtype: str = "auto",
        drafts: int = 0,
        page_size: int = PAGE_SIZE,
        chunk: int = CHUNK,
        host_memory: int = 0,
        checkpoint_dtype: str = EXACT,
    ) -> CapacityPlan:
        """The plan of `spec` on each of `devices` equal devices.

        `memory`: bytes of the arena on a device, or as a float the share of the device that weights, working
        memory and arena take together; None: what the engine would take. `drafts`: drafts that a
        step verifies; their records lie in the slot, and the MTP head's KV, where there is one, in the page.
        `page_size`: tokens of a page; `chunk`: tokens of a chunk of the chunked form. `host_memory`: bytes
        beside each device for checkpoints that leave its arena, whose states are kept in `checkpoint_dtype`.
        Raises ConfigError for what cannot be, CapacityError when weights or one request do not fit.
        """
        if not 0 <= drafts < MOST_DRAFTED:
            raise ConfigError(f"--drafts is {drafts}; it must be 0 or more, and less than {MOST_DRAFTED:,}")
        if checkpoint_dtype not in CHECKPOINT_DTYPES:
            supported = ", ".join(CHECKPOINT_DTYPES)
            raise ConfigError(f"--checkpoint-dtype is {checkpoint_dtype!r}; supported: {supported}")
        share = share_of(spec, devices)
        ledger = ledger_of(share, kv_dtype)
        weights = weight_bytes(share, fp8_blocks=device.fp8_blocks)
        part = memory if isinstance(memory, float) else None
        budget = memory if isinstance(memory, int) else arena_budget(share, device, chunk, part)
        if budget <= 0 and part is not None:
            raise CapacityError(
                f"--memory {part:g} of {device.name} with {size_text(device.memory_bytes)} has no room for "
                f"states and KV beside {size_text(weights)} of weights and working memory; raise it"
            )
        if budget <= 0:
            raise CapacityError(
                f"{device.name} with {size_text(device.memory_bytes)} has no room for states and KV beside "
                f"{size_text(weights)} of weights; choose a larger device, or several that share "
                "the model (--tensor-parallel)"
            )
        cost = draft_cost(share, drafts, kv_dtype) if drafts else None
        layout = _layout(share, page_size, None if kv_dtype == "auto" else kv_dtype, cost)
        return cls(
            share,
            ledger,
            layout,
            device,
            share.dtype if kv_dtype == "auto" else kv_dtype,
            weights,
            working_bytes(share, DEFAULT_BATCHED_TOKENS[device.kind], DEFAULT_NUM_SEQS, chunk),
            layout.num_slabs(budget),
            cost,
            chunk,
            CheckpointForm.of(layout, checkpoint_dtype),
            host_memory,
        )

    @property
    def arena_bytes(self) -> int:
        return self.num_slabs * self.layout.slab_bytes

    @property
    def longest_request(self) -> int:
        """Tokens of the longest request that model and arena take."""
        fits = self.layout.longest_request(self.num_slabs)
        return self.spec.max_position if fits is None else min(fits, self.spec.max_position)

    def holding(self, lengths: Lengths) -> Holding:
        """As many requests of these lengths as fit at once.

        Raises ConfigError when not one is short enough; those that are too long are left out.
        """
        kept = lengths.within(self.longest_request)
        layout = self.layout
        mean_pages = kept.mean_blocks(layout.page_size)
        requests = mixture_that_fits(layout, self.num_slabs, mean_pages)
        entries = mixture_need(layout, requests, mean_pages)
        held = {name: n * layout.size_class(name).stride for name, n in entries.items()}
        running = min(requests, DEFAULT_NUM_SEQS)
        return Holding(
            lengths=kept,
            left_out=len(lengths.totals) - len(kept.totals),
            requests=requests,
            entries=entries,
            state_bytes=held.get(SLOT, 0),
            kv_bytes=held.get(PAGE, 0),
            arena_bytes=self.arena_bytes,
            conversations=requests,
            running=running,
            conversations_beside=requests - running,
            conversations_on_host=int(self.host_bytes / self._stored_bytes(mean_pages)),
        )

    def _stored_bytes(self, mean_pages: Fraction) -> Fraction:
        """Of a conversation in host memory."""
        return mean_pages * self.form.page_bytes + self.form.slot_blocks * self.form.block_bytes


@dataclass(frozen=True)
class Holding:
    """A full arena. Every request has its full length, prompt and output; `entries` are the slots and pages
    of them all. A cached conversation is one checkpoint and the pages of its tokens, which is what a request
    holds: `conversations` when nothing runs, `conversations_beside` while `running` requests do, and
    `conversations_on_host` more in host memory.
    """

    lengths: Lengths
    left_out: int
    requests: int
    entries: dict[str, int]
    state_bytes: int
    kv_bytes: int
    arena_bytes: int
    conversations: int
    running: int
    conversations_beside: int
    conversations_on_host: int

    @property
    def rest_bytes(self) -> int:
        """Of the arena: too little for one request more, and what slabs leave over."""
        return self.arena_bytes - self.state_bytes - self.kv_bytes


def _layout(spec: ModelSpec, page_size: int, kv_dtype: str | None, drafts: DraftCost | None) -> ArenaLayout:
    """The engine's layout, with records in the slot and the MTP head's KV in the page, with drafts."""
    if drafts is None:
        return ArenaLayout.of(spec, page_size, kv_dtype)
    trunk = len(spec.layers)
    mtp = [trunk + i for i, layer in enumerate(spec.mtp_layers) if layer.mixer.kv_elements()]
    layout = ArenaLayout.of(spec, page_size, kv_dtype, [*spec.attention_layers, *mtp])
    sizes = {size.name: size.entry_bytes for size in layout.classes}
    if SLOT in sizes:
        sizes[SLOT] = -(-sizes[SLOT] // TENSOR_ALIGN) * TENSOR_ALIGN + drafts.records_bytes
    slab, counts = smallest_slab(sizes.get(PAGE, 0), sizes.get(SLOT, 0))
    per_slab = dict(zip((PAGE, SLOT), counts, strict=True))
    classes = tuple(
        replace(
            size,
            entry_bytes=sizes[size.name],
            stride=slab // per_slab[size.name],
            count=per_slab[size.name],
        )
        for size in layout.classes
    )
    return replace(layout, slab_bytes=slab, classes=classes)
