"""What structured output costs on the host: compiling a form, and a mask for every token.

    python -m bench.structured [--vocab 248320] [--device cpu|cuda] [--json FILE]

The vocabulary is made up: bytes, and words of random letters with and without a space before them, as many as
Qwen3.5 has. `compile_ms` is once for each form; `mask_us` is what a token costs (median): accepting
it and filling the next mask. `floor_us` is numpy writing as many bytes. On a CUDA device `apply_us` is one
step's masks for 64 completions on their way to the device and onto the logits.
"""

from __future__ import annotations

import random
import string
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.report import parser_of, write
from denim.engine.grammars import structural_tag
from denim.runner.constraint import Constraint
from denim.structured_output import StructuredOutput

QWEN3_5_VOCAB = 248_320
ROWS = 64
STEPS = 200
FIELDS = {f"field_{number}": {"type": ["string", "integer"]} for number in range(20)}
FORMS = {
    "any JSON object": (StructuredOutput(json_object=True), '{"name": "' + "some words of a text " * 10),
    "schema of 20 fields": (
        StructuredOutput(json={"type": "object", "properties": FIELDS, "required": list(FIELDS)}),
        '{"field_0": "' + "some words of a text " * 10,
    ),
    "regex": (StructuredOutput(regex="[a-z ]+[0-9]{4}"), "some words of a text " * 10),
    "regex, bounded": (StructuredOutput(regex="[a-z ]{1,50}"), "some words of a text"),
    "1,000 choices": (
        StructuredOutput(choice=[f"choice number {number} of many" for number in range(1000)]),
        "choice number 12 of many",
    ),
}


def vocabulary(size: int) -> list[bytes]:
    chance = random.Random(0)
    words = {bytes([byte]): None for byte in range(256)}
    while len(words) < size:
        length = min(12, 2 + int(chance.expovariate(0.3)))
        word = "".join(chance.choices(string.ascii_letters, k=length))
        words.setdefault((" " * chance.randrange(2) + word).encode())
    return list(words)


def microseconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def measure(size: int, device: str) -> list[dict[str, Any]]:
    import xgrammar

    words = vocabulary(size)
    info = xgrammar.TokenizerInfo(words, xgrammar.VocabType.RAW, vocab_size=size, stop_token_ids=[0])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    number = {word: token for token, word in enumerate(words)}
    floor = np.zeros(-(-size // 32), dtype=np.int32)
    floor_us = min(microseconds(lambda: floor.fill(-1)) for _ in range(50))
    rows = []
    for name, (form, text) in FORMS.items():
        begin = time.perf_counter()
        compiled = compiler.compile_structural_tag(structural_tag(form))
        compiling = time.perf_counter() - begin
        one = Constraint(compiled, size, [0], [0])
        tokens = [number[bytes([byte])] for byte in text.encode()]
        times = [microseconds(partial(one.accept, token)) for token in tokens]
        row = {"form": name, "compile_ms": compiling * 1e3, "mask_us": median(times), "floor_us": floor_us}
        rows.append(row | ({"apply_us": apply_us(one, size)} if device == "cuda" else {}))
    return rows


def apply_us(one: Constraint, size: int) -> float:
    """As the sampler does it, device time included."""
    from xgrammar import apply_token_bitmask_inplace

    logits = torch.zeros(ROWS, size, device="cuda")
    masks = one.mask.repeat(ROWS, 1)

    def step() -> None:
        bits = masks.pin_memory().to("cuda", non_blocking=True)
        apply_token_bitmask_inplace(logits, bits, vocab_size=size)

    for _ in range(10):
        step()
    torch.cuda.synchronize()
    took = microseconds(lambda: ([step() for _ in range(STEPS)], torch.cuda.synchronize()))
    return took / STEPS


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--vocab", type=int, default=QWEN3_5_VOCAB)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args()
    write(given.json, given.device, measure(given.vocab, given.device))


if __name__ == "__main__":
    main()
