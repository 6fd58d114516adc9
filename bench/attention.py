"""Attention over pages on one GPU: Denim's kernels beside FlashInfer's and the device's floors.

    python -m bench.attention [--heads 8,2,256] [--json FILE]

Every figure is the median over replays of a captured graph whose calls rotate among pages that the cache
cannot hold; the pages of six layers lie in one arena, as in the engine. The floor is what the bytes of the
KV, or the FLOPs of what is not masked, take at the device's own measured rates; figures in brackets are times
over it. "portable" is the Triton kernel that other devices get. Where FlashInfer is installed, what its plan
costs the host each step is told as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bench.report import parser_of, save
from bench.rules.clock import Floors, floors, microseconds, sets_of
from bench.rules.tables import Row, lines
from denim.errors import ConfigError
from denim.layers.batch import StepBatch
from denim.layers.paged_attention import (
    FLASHINFER,
    TRITON,
    AttentionShape,
    PagedAttention,
    StepLimits,
    attention_backend,
    paged_attention,
)
from denim.runner.packing import arrange, pack, sender
from denim.runner.plan import Span

PAGE, LAYERS = 16, 6
ARENA_TOKENS = 300_000
DECODE = {
    "1 × 192": [192],
    "1 × 1k": [1024],
    "1 × 8k": [8192],
    "1 × 32k": [32768],
    "32 × 192": [192] * 32,
    "32 × 1k": [1024] * 32,
    "32 × 8k": [8192] * 32,
    "256 × 192": [192] * 256,
    "256 × 1k": [1024] * 256,
    "8 × 32k": [32768] * 8,
    "32k + 255 × 200": [32768] + [200] * 255,
}
SEGMENTS = {  # (tokens of the span, tokens that it sees), so many times
    "512": [(512, 512)],
    "1k": [(1024, 1024)],
    "2k": [(2048, 2048)],
    "8k": [(8192, 8192)],
    "32k": [(32768, 32768)],
    "16 × 2k": [(2048, 2048)] * 16,
    "8k behind 24k": [(8192, 32768)],
    "128 behind 4k": [(128, 4224)],
    "32 × 128 behind 4k": [(128, 4224)] * 32,
    "512 behind 8k": [(512, 8704)],
}


class Bench(NamedTuple):
    """Pages of some layers, [pages, LAYERS, 2, PAGE, kv_heads, dim], and where they lie in random order."""

    shape: AttentionShape
    arena: Tensor
    order: list[int]

    @classmethod
    def of(cls, shape: AttentionShape, kv_dtype: torch.dtype) -> Bench:
        pages = ARENA_TOKENS // PAGE
        size = (pages, LAYERS, 2, PAGE, shape.num_kv_heads, shape.dim)
        arena = torch.empty(size, dtype=kv_dtype, device="cuda")
        for part in arena.split(2048):
            part.copy_(torch.randn(part.shape, dtype=torch.bfloat16, device="cuda"))
        return cls(shape, arena, torch.randperm(pages).tolist())

    def batches(self, spans: list[tuple[int, int]], decode: bool) -> list[StepBatch]:
        """Steps of these spans, each over pages of its own, as many as the cache cannot hold."""
        counts = [-(-length // PAGE) for _, length in spans]
        wanted = -(-sets_of(self.kv_bytes(spans)) // LAYERS)
        made, at = [], 0
        while len(made) < wanted and at + sum(counts) <= len(self.order):
            slots = []
            for (new, length), count in zip(spans, counts, strict=True):
                pages = self.order[at : at + count]
                at += count
                slots.append(Span(0, length - new, [0] * new, pages, 0 if decode else -1, 0))
            device = torch.device("cuda")
            step = arrange(slots, {}, page_size=PAGE, paged=True)
            made.append(pack(step, None, page_size=PAGE, send=sender(device)).batch)
        return made

    def kv_bytes(self, spans: list[tuple[int, int]]) -> int:
        tokens = sum(length for _, length in spans)
        return 2 * tokens * self.shape.num_kv_heads * self.shape.dim * self.arena.element_size()

    def flops(self, spans: list[tuple[int, int]]) -> int:
        """Of scores and sums that are not masked."""
        seen = sum(new * (length - new) + new * (new + 1) // 2 for new, length in spans)
        return 4 * seen * self.shape.num_heads * self.shape.dim


def made(backend: str, bench: Bench, portable: bool) -> PagedAttention:
    attention = paged_attention(
        backend,
        [bench.shape],
        StepLimits(256, 40_000, len(bench.order)),
        page_size=PAGE,
        dtype=torch.bfloat16,
        kv_dtype=bench.arena.dtype,
        device=torch.device("cuda"),
    )
    assert attention is not None
    if portable:
        attention.hopper = False
    return attention


def rows(
    bench: Bench, ways: dict[str, Callable[[], PagedAttention]], limits: Floors, section: str, decode: bool
) -> Iterator[Row]:
    """One line a shape, one column a way to attend."""
    shapes = {name: [(1, n) for n in lengths] for name, lengths in DECODE.items()} if decode else SEGMENTS
    for name, spans in shapes.items():
        batches = bench.batches(spans, decode)
        tokens = sum(new for new, _ in spans)
        q = torch.randn(tokens, bench.shape.num_heads, bench.shape.dim, dtype=torch.bfloat16, device="cuda")
        floor = limits.microseconds(bench.kv_bytes(spans), bench.flops(spans))
        for way, make in ways.items():
            planned = []
            for batch in batches:
                attention = make()
                if decode:  # in a captured step, and not known to be so otherwise
                    attention = attention.captured(
                        len(spans), StepLimits(len(spans), tokens, len(bench.order))
                    )
                attention.plan(batch)
                planned.append(attention)
            begin = time.perf_counter()
            planned[0].plan(batches[0])
            plan = (time.perf_counter() - begin) * 1e6

            def work(i: int, planned: list = planned, batches: list = batches, q: Tensor = q) -> Tensor:
                which, layer = divmod(i, LAYERS)
                kv = bench.arena[:, layer]
                return planned[which].run(q, kv, batches[which], bench.shape.dim**-0.5)

            taken = microseconds(work, len(batches) * LAYERS)
            note = f"its plan takes {plan:.0f} µs of the host for {name}" if way == "FlashInfer" else ""
            yield Row(section, name, way, taken, floor, note if name == "256 × 1k" else "")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--heads", default="8,2,256", help="query heads, KV heads, numbers of a head")
    args = parser.parse_args()
    torch.manual_seed(0)
    measured: list[Row] = []
    with torch.inference_mode():
        limits = floors()
        bench = Bench.of(AttentionShape(*map(int, args.heads.split(","))), torch.bfloat16)
        shared = {"Denim": made(TRITON, bench, False), "portable": made(TRITON, bench, True)}
        ways: dict[str, Callable[[], PagedAttention]] = {
            name: partial(lambda attention: attention, attention) for name, attention in shared.items()
        }
        try:
            attention_backend(FLASHINFER, [bench.shape], dtype=torch.bfloat16, device_type="cuda")
            ways["FlashInfer"] = partial(made, FLASHINFER, bench, False)
        except ConfigError as error:
            print(error)
        eight = Bench.of(bench.shape, torch.float8_e4m3fn)
        for section, pages, columns, decode in (
            ("decode, µs a layer", bench, ways, True),
            ("segments, µs a layer", bench, ways, False),
            (
                "decode over KV in 8 bits, µs a layer",
                eight,
                {"Denim": partial(made, TRITON, eight, False)},
                True,
            ),
        ):
            part = list(rows(pages, columns, limits, section, decode))
            measured += part
            print("\n".join(lines(part)), flush=True)
            save(  # after every section: a run that is cut short leaves what it has
                args.json,
                "cuda",
                ("flashinfer-python",),
                heads=args.heads,
                floors=limits._asdict(),
                rows=[row.as_json() for row in measured],
            )


if __name__ == "__main__":
    main()
