"""The paged attention kernel against a plain softmax, with NaN where nothing was written."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from denim.layers.kernels.paged_attention import Tiles, attend_pages
from denim.layers.kernels.split_keys import (
    Cut,
    Workspace,
    kept_decode_units,
    kept_floats,
    kept_units,
    most_units,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = 4
SMALL = Tiles(16, 16, 4, 1)
SOME = Cut(4, 128, 1024)
TIGHT = {"atol": 2e-5, "rtol": 2e-5}


@dataclass
class Case:
    """Spans of `news` tokens that see `lengths` tokens each; a length of 0 is padding."""

    lengths: list[int]
    news: list[int]
    heads: int
    kv_heads: int
    dim: int
    extra: int = 0
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    cut: Cut = SOME
    programs: int = 5
    tiles: Tiles = SMALL
    gated: bool = False
    decode: bool = False

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        counts = [-(-n // PAGE) for n in self.lengths]
        pages = sum(counts) + 3
        width = self.dim + self.extra
        sides = 1 if self.extra else 2
        kv = torch.full((pages, sides + 1, PAGE, self.kv_heads, width), float("nan"))
        order = torch.randperm(pages, generator=generator)
        self.page_ids = order[: sum(counts)].int()
        self.page_indptr = torch.tensor([0, *counts]).cumsum(0).int()
        self.content = []
        for row, length in enumerate(self.lengths):
            content = randn(length, sides, self.kv_heads, width)
            table = self.page_ids[self.page_indptr[row] :].long()
            at = torch.arange(length)
            kv[table[at // PAGE], :sides, at % PAGE] = content
            self.content.append(content)
        kv_dtype = self.kv_dtype or self.dtype
        self.kv = kv.to(kv_dtype)[:, :sides]  # with a gap between pages, as an arena has
        self.content = [content.to(kv_dtype).float() for content in self.content]
        tokens = sum(self.news)
        # Heads of queries and gates one behind the other, as a gated projection has them.
        both = randn(tokens, self.heads, 2 * width).to(self.dtype)
        self.q, self.gate = both[..., :width], both[..., width : width + self.dim]
        self.q_indptr = torch.tensor([0, *self.news]).cumsum(0).int()

    def expected(self) -> Tensor:
        out = torch.full((sum(self.news), self.heads, self.dim), float("nan"))
        for row, (length, new) in enumerate(zip(self.lengths, self.news, strict=True)):
            if not length:
                continue
            here = slice(int(self.q_indptr[row]), int(self.q_indptr[row + 1]))
            group = self.heads // self.kv_heads
            k, v = (self.content[row][:, side].repeat_interleave(group, 1) for side in (0, -1))
            scores = torch.einsum("nhd,lhd->hnl", self.q[here].float(), k) * 0.3
            hidden = torch.ones(new, length, dtype=torch.bool).triu(length - new + 1)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out[here] = torch.einsum("hnl,lhd->nhd", weights, v[..., : self.dim])
            if self.gated:
                out[here] *= self.gate[here].float().sigmoid()
        return out

    def attended(self, rows: slice = slice(None), workspace: Workspace | None = None) -> Tensor:
        """What the kernel writes for these spans; NaN elsewhere."""
        lengths, first = self.lengths[rows], rows.start or 0
        out = torch.full((sum(self.news), self.heads, self.dim), float("nan"), dtype=self.dtype)
        group = self.heads // self.kv_heads
        units = kept_units(self.cut)
        if self.decode:
            units = kept_decode_units(len(lengths), sum(lengths), self.kv_heads, self.cut)
        floats = kept_floats(units, max(group, 16), self.dim)
        moved = [
            t.to(DEVICE)
            for t in (
                self.q_indptr[first:],
                torch.tensor(lengths, dtype=torch.int32),
                self.page_ids,
                self.page_indptr[first:],
            )
        ]
        kv, out = self.kv.to(DEVICE), out.to(DEVICE)
        workspace = workspace or Workspace.of(floats, DEVICE)
        attend_pages(
            self.q.to(DEVICE),
            kv[:, 0],
            None if self.extra else kv[:, 1],
            *moved,
            0.3,
            self.tiles,
            workspace,
            cut=self.cut,
            programs=self.programs,
            out=out,
            gate=self.gate.to(DEVICE) if self.gated else None,
            decode=self.decode,
        )
        assert not workspace.counters.any(), "counters are zero between launches"
        return out.cpu().float()

    def check(self, **tolerance: float) -> None:
        torch.testing.assert_close(self.attended(), self.expected(), equal_nan=True, **(tolerance or TIGHT))


DECODE = [1, 3, 4, 0, 5, 127, 128, 129, 300]


@pytest.mark.parametrize("heads", [(6, 2, 8), (4, 4, 24), (20, 1, 16)], ids=str)
def test_decode_rows(heads: tuple[int, int, int]) -> None:
    """Rows of one token, padding among them; 20 heads that share one key head are two tiles."""
    Case(DECODE, [1] * len(DECODE), *heads, decode=True, gated=True).check()


@pytest.mark.parametrize("wave", [1, 20])
@pytest.mark.parametrize("news", [[1, 1, 2, 5, 9], [1, 3, 4, 17, 40]], ids=str)
def test_segments_behind_a_past(news: list[int], wave: int) -> None:
    Case([1, 3, 4, 130, 200], news, 3, 1, 8, gated=True, cut=Cut(wave, 128, 1 << 30), programs=20).check()


def test_latents_are_keys_and_values() -> None:
    Case([1, 130, 0, 300], [1] * 4, 5, 1, 24, extra=8, decode=True).check()


def test_half_precision() -> None:
    """The interpreter multiplies no bf16."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    Case([5, 300], [1, 1], 4, 2, 32, dtype=dtype, decode=True).check(atol=2e-2, rtol=2e-2)


def test_kv_in_8_bits() -> None:
    """Equal to attention over the values that 8 bits hold."""
    Case([5, 300], [1, 1], 4, 2, 32, kv_dtype=torch.float8_e4m3fn, decode=True).check()


def test_a_row_does_not_depend_on_its_company() -> None:
    case = Case(DECODE, [1] * len(DECODE), 6, 2, 8, decode=True)
    together = case.attended()
    for row in (1, 7, 8):
        alone = case.attended(slice(row, row + 1))
        assert torch.equal(alone[row], together[row])


def test_counters_survive_a_second_launch() -> None:
    case = Case([300, 17, 260], [1, 1, 1], 4, 2, 16, decode=True)
    workspace = Workspace.of(1 << 14, DEVICE)
    assert torch.equal(case.attended(workspace=workspace), case.attended(workspace=workspace))


@pytest.mark.parametrize("decode", [False, True])
def test_bounds_hold(decode: bool) -> None:
    """Units and partial sums of random steps stay below what is launched and reserved."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(300):
        spans, kv_heads = (int(torch.randint(1, 9, (), generator=generator)) for _ in range(2))
        group, wave, rows = (2 ** int(torch.randint(0, 8, (), generator=generator)) for _ in range(3))
        rows *= 16
        cut = Cut(wave, 128, 1024 if decode else 1 << 30)
        news = [1] * spans if decode else torch.randint(1, 400, (spans,), generator=generator).tolist()
        lengths = [new + int(torch.randint(0, 40_000, (), generator=generator)) for new in news]
        units = kept = 0
        each = wave if decode else max(wave // spans, 1)
        for new, length in zip(news, lengths, strict=True):
            tiles = -(-new * group // rows)
            finest = -(-length * tiles * kv_heads // each)
            split = min(max(cut.least, -(-finest // 128) * 128), cut.most)
            splits = -(-length // split)
            units += tiles * splits * kv_heads
            kept += tiles * splits * kv_heads if splits > 1 else 0
        if decode:
            per_unit = min(group, rows)
            floats = kept_floats(
                kept_decode_units(spans, sum(lengths), kv_heads, cut), max(group, per_unit), 64
            )
        else:
            assert units <= most_units(spans, sum(news), group, kv_heads, rows, cut)
            per_unit = rows
            floats = kept_floats(kept_units(cut), rows, 64)
        assert kept * per_unit * 64 <= floats


def test_offsets_beyond_32_bits() -> None:
    """Pages further apart than 2^31 numbers, in a process of its own: a wrong offset may end it."""
    code = """
import torch
from tests.layers.kernels.test_paged_attention import Case, DEVICE
case = Case([9, 3], [1, 1], 2, 1, 16, decode=True)
pages = len(case.kv)
near, stride = case.kv, (1 << 31) // (pages - 1) + 64
far = torch.empty(pages * stride, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
case.kv = far.as_strided(near.shape, (stride, *torch.empty(near.shape[1:], device="meta").stride()))
for page in range(pages):
    case.kv[page] = near[page].to(far.dtype).to(DEVICE)
case.content = [content.to(far.dtype).float() for content in case.content]
case.check()
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
