"""Compiles a kernel for Hopper where there is none, in a process of its own: here Triton may interpret."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

CODE = """
from importlib import import_module
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

kernel = getattr(import_module({module!r}), {name!r})
constants, types = {constants!r}, {types!r}
signature, attributes = {{}}, {{}}
for n, argument in enumerate(kernel.arg_names):
    if argument in constants:
        signature[argument] = "constexpr"
        continue
    ends = [end for end in types if end[:1] in ("", "_") and argument.endswith(end)]
    signature[argument] = types.get(argument) or types[max(ends, key=len)]
    if {aligned} and argument.endswith(("_ptr", "_stride")):
        attributes[(n,)] = [["tt.divisibility", 16]]
places = {{(kernel.arg_names.index(name),): value for name, value in constants.items()}}
source = GluonASTSource(kernel, signature, places, attributes)
made = compile(source, target=GPUTarget("cuda", 90, 32), options={options!r})
missing = [part for part in {needs!r} if part not in made.asm["ptx"]]
assert not missing, missing
assert made.metadata.shared <= 227 << 10, made.metadata.shared
"""


def check_compiles(
    module: str,
    name: str,
    constants: Mapping[str, Any],
    types: Mapping[str, str],
    needs: Sequence[str],
    *,
    aligned: bool = False,
    **options: Any,
) -> None:
    """AssertionError if kernel `name` of a module of Denim does not compile, to PTX that has what it `needs`
    and within a multiprocessor's shared memory.

    types: of the arguments that are no constants, by name or by the end of names ("_ptr"; "" for all others);
    aligned: pointers and strides are multiples of 16; options: of the compiler.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    code = CODE.format(
        module=f"denim.{module}",
        name=name,
        constants=dict(constants),
        types=dict(types),
        needs=list(needs),
        aligned=aligned,
        options=options,
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
