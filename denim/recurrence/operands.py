"""What a caller hands to a rule: tensors whose dimensions, kind of numbers and device fit each other.

Owns the one check of them, at the border of the public functions of this package, and its messages. Looks at
shapes, dtypes and devices only, never at values: that costs no wait for a device. Must not know any rule's
arithmetic. Errors are ValueErrors that name the operand, what it must be and what was seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite
from numbers import Real
from operator import index
from typing import Any

from torch import Tensor, strided

TOKENS = "T"  # the one dimension that may be 0; a step's rows are its tokens


def check_operands(**operands: tuple[Tensor, str]) -> dict[str, int]:
    """Each operand by name: (tensor, its dimensions, "T Hk d_k" say). Returns the size of each dimension.

    A dimension means one size in all operands, and is as long as in the first that has it. ValueError for
    another shape, an empty dimension other than T, numbers that are not floating-point, or two devices.
    """
    sizes: dict[str, int] = {}
    first_name, (first, _) = next(iter(operands.items()))
    for name, (x, text) in operands.items():
        check_numbers(name, x, first_name, first)
        dims, shape = text.split(), x.shape
        fits = len(dims) == len(shape)
        for dim, n in zip(dims, shape, strict=False):
            fits = fits and sizes.setdefault(dim, n) == n and (n > 0 or dim == TOKENS)
        if not fits:
            only_tokens = ", of which T alone may be 0" if 0 in shape else ""
            raise ValueError(f"{name} must be {_shape_text(dims, sizes)}{only_tokens}; got {list(shape)}")
    return sizes


def check_numbers(name: str, x: Tensor, like_name: str, like: Tensor) -> None:
    """ValueError if `x` is no dense tensor of floating-point numbers on the device of `like`, or if they have
    8 bits: torch neither computes in those nor widens them by itself."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor; got {type(x).__name__}")
    if not x.is_floating_point():
        raise ValueError(f"{name} must hold floating-point numbers, got {x.dtype}; pass {name}.float()")
    if x.element_size() < 2:
        raise ValueError(f"{name} must hold numbers of 16 bits or more, got {x.dtype}; pass {name}.float()")
    if x.layout != strided:
        raise ValueError(f"{name} must be dense, got {x.layout}; pass {name}.to_dense()")
    if isinstance(like, Tensor) and x.device != like.device:
        raise ValueError(f"{name} is on {x.device} but {like_name} on {like.device}; move one of them")


def check_matrix_operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    scale: float | None,
    **others: tuple[Tensor, str],
) -> dict[str, int]:
    """Those of a rule with matrix states: its own are `others`, as `check_operands` takes them. Returns the
    sizes T, Hk, d_k, Hv, d_v.

    q, k: [T, Hk, d_k]; v: [T, Hv, d_v], Hv a multiple of Hk; log_decay: None, [Hv], [T, Hv] or [T, Hv, d_k]
    ([T, Hv, 1] is [T, Hv]); scale: None or a number.
    """
    sizes = check_operands(q=(q, "T Hk d_k"), k=(k, "T Hk d_k"), v=(v, "T Hv d_v"), **others)
    check_heads(sizes)
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, Real) or not isfinite(scale)):
        raise ValueError(f"scale must be None or a finite number; got {scale!r}")
    tokens, heads = sizes["T"], sizes["Hv"]
    if log_decay is not None:
        check_numbers("log_decay", log_decay, "v", v)
        shape = tuple(log_decay.shape)
        if shape not in ((heads,), (tokens, heads), (tokens, heads, 1), (tokens, heads, sizes["d_k"])):
            raise ValueError(
                f"log_decay must be None, [Hv], [T, Hv] or [T, Hv, d_k] with T = {tokens}, Hv = {heads} and "
                f"d_k = {sizes['d_k']}; got {list(shape)}"
            )
    return sizes


def check_heads(sizes: dict[str, int]) -> None:
    """ValueError if the value heads Hv cannot share the key heads Hk evenly."""
    if sizes["Hv"] % sizes["Hk"]:
        raise ValueError(
            f"v has {sizes['Hv']} heads, which must be a multiple of the {sizes['Hk']} of q and k"
        )


def whole_numbers(values: Iterable[Any] | Tensor) -> list[int] | None:
    """A list, tensor or array of whole numbers as a list of ints; None if it is not one. A bool is none."""
    try:
        listed = list(values.tolist() if hasattr(values, "tolist") else values)
        return None if any(value is True or value is False for value in listed) else [*map(index, listed)]
    except TypeError:
        return None


def check_chunk_size(size: int) -> None:
    """Any number of tokens will do, a power of two or not."""
    if whole_numbers([size]) is None or size < 1:
        raise ValueError(f"chunk_size must be a whole number of tokens, 1 or more; got {size!r}")


def _shape_text(names: Sequence[str], sizes: dict[str, int]) -> str:
    """[T, Hv, d_v] = [6, 4, d_v] where T and Hv are known."""
    text = f"[{', '.join(names)}]"
    known = f"[{', '.join(str(sizes.get(name, name)) for name in names)}]"
    return text if known == text else f"{text} = {known}"
