"""The kernels of the linear rules on one GPU, beside floors and other libraries, in one run.

    python -m bench.recurrence [--section decode --section prefill …] [--json FILE]

Every figure is the median over replays of a captured graph whose calls rotate among inputs that the cache
cannot hold. The floor of a line is what its bytes or FLOPs take at the device's own measured rates; figures
in brackets are times over it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from bench.report import parser_of, save
from bench.rules import (
    deferred_writes,
    delta_decode,
    delta_prefill,
    error_cases,
    errors,
    kimi,
    other_rules,
    peers,
    tables,
)
from bench.rules.clock import Floors, floors
from bench.rules.tables import Row

PEER_PACKAGES = ("fla-core", "flash-qla", "flashinfer-python", "mamba-ssm")

SECTIONS: dict[str, Callable[[Floors], Iterator[Row]]] = {
    "decode": delta_decode.gated_delta_rows,
    "deferred": deferred_writes.rows,
    "kimi-decode": kimi.decode_rows,
    "prefill": delta_prefill.gated_delta_rows,
    "kimi-prefill": kimi.prefill_rows,
    "other-decode": other_rules.decode_rows,
    "other-prefill": other_rules.prefill_rows,
}
ERRORS = "errors"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--section", action="append", choices=(*SECTIONS, ERRORS))
    args = parser.parse_args()

    wanted = args.section or [*SECTIONS, ERRORS]
    peers.own_kernels_only()
    torch.manual_seed(0)
    measured: list[Row] = []
    found: list[errors.Error] = []
    with torch.inference_mode():
        limits = floors()
        print(
            f"{torch.cuda.get_device_name()}: copies at {limits.bytes_per_second / 1e9:,.0f} GB/s,"
            f" bf16 products at {limits.flops_per_second / 1e12:,.0f} TFLOP/s\n",
            flush=True,
        )
        for name in wanted:
            begin = time.perf_counter()
            if name == ERRORS:
                found = list(error_cases.every_error())
                print("\n".join(errors.lines(found)), flush=True)
            else:
                rows = list(SECTIONS[name](limits))
                measured += rows
                print("\n".join(tables.lines(rows)), flush=True)
            print(f"({name}: {time.perf_counter() - begin:.0f} s)\n", flush=True)
            save(  # after every section: a run that is cut short leaves what it has
                args.json,
                "cuda",
                PEER_PACKAGES,
                floors=limits._asdict(),
                rows=[row.as_json() for row in measured],
                errors=[error.as_json() for error in found],
            )


if __name__ == "__main__":
    main()
