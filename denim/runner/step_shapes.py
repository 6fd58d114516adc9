"""The shapes of steps that are captured: how many rows, spans and tokens there is room for.

Owns which shapes there are and how sparse they are; what a shape costs is measured on an H200. Knows counts
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Decode rows between shapes, up to so many: a padded row costs its share of the products, a graph its
# capture.
_STRIDES = ((64, 8), (128, 16), (256, 32), (1 << 30, 64))
# Tokens of shapes with prefill; beside them, as many tokens as a step may have. Padding is cheaper than the
# launches of an eager step. One prompt alone has shapes of its own, so that its pass is cut as it should be.
_PROMPT_TOKENS = (64, 128, 256, 512, 768, 1024, 1536, 2048, 4096)
_MIXED_TOKENS = (64, 256, 512, 1024, 2048, 4096)
_MIXED_ROWS = (8, 32)  # and as many as a step may have
# Spans behind the decode rows of such a shape: one for so many of its tokens, within these limits. A span
# that is not there costs programs that look and leave; a step of more spans than the most would run eagerly.
_TOKENS_PER_SPAN = 16
_LEAST_PREFILL_SPANS, MOST_PREFILL_SPANS = 16, 64


class StepShape(NamedTuple):
    """`rows` decode rows, and behind them `spans` spans of `tokens` tokens in all."""

    rows: int
    spans: int = 0
    tokens: int = 0

    def holds(self, rows: int, spans: int, tokens: int) -> bool:
        return rows <= self.rows and spans <= self.spans and tokens <= self.tokens

    @property
    def cost(self) -> tuple[int, int]:
        """In the order of what a step of this shape takes."""
        return self.rows + self.tokens, self.spans


def decode_shapes(most: int) -> list[StepShape]:
    """Shapes for steps of at most `most` decode rows: 1, 2, 4, 8, then ever sparser, and `most`."""
    sizes = [size for size in (1, 2, 4, 8) if size <= most]
    for end, stride in _STRIDES:
        while sizes[-1] + stride <= min(end, most):
            sizes.append(sizes[-1] + stride)
    return [StepShape(size) for size in (sizes if sizes[-1] == most else [*sizes, most])]


def prefill_shapes(most_rows: int, most_tokens: int) -> list[StepShape]:
    """Shapes for steps with prefill, of at most so many decode rows, and tokens in all."""

    def sizes(most: Sequence[int]) -> list[int]:
        return sorted({*(size for size in most if size < most_tokens), most_tokens})

    def spans(tokens: int) -> int:
        return min(max(tokens // _TOKENS_PER_SPAN, _LEAST_PREFILL_SPANS), MOST_PREFILL_SPANS)

    rows = sorted({*(size for size in _MIXED_ROWS if size < most_rows), most_rows})
    alone = [StepShape(0, 1, tokens) for tokens in sizes(_PROMPT_TOKENS)]
    return alone + [StepShape(n, spans(tokens), tokens) for n in rows for tokens in sizes(_MIXED_TOKENS)]
