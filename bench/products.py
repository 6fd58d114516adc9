"""The products of a decode step around its mixers on one GPU: Denim's kernels beside cuBLAS and the floor.

    python -m bench.products [--model qwen3.5-0.8b] [--json FILE]

Microseconds a layer of a chain of layers, norms included: into the mixer, out of it, and the network behind
it; in a captured graph, with weights that the cache cannot hold. The floor is the weights' bytes at the
device's own measured copy bandwidth; figures in brackets are times over it. "portable" is the kernel that
devices other than Hopper get for 2 to 64 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.random_model import spec_of
from bench.report import parser_of, save
from bench.rules.clock import Floors, floors, microseconds
from bench.rules.tables import Row, lines
from denim.layers.kernels.gated_activation import silu_mul
from denim.layers.kernels.rms_norm import rms_norm
from denim.layers.kernels.small_product import small_product, tiles_for
from denim.layers.linear import SHARED_TILES
from denim.spec.ffn import DenseFFN
from denim.spec.linear import GatedDeltaNet

ROWS = (1, 2, 4, 8, 16, 32, 64)
LAYERS = 8  # of Qwen3.5-0.8B's dimensions they have 330 MB
EPS = 1e-6
Product = Callable[..., Tensor]


class Layer(NamedTuple):
    """Weights [N, K] of a layer, gate_up as [gate | up], and counters of programs that share a tile."""

    into: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    arrivals: Tensor


def layers_of(model: str) -> list[Layer]:
    """As wide as the linear layers of bench/configs/`model`.json."""
    spec = spec_of(model, "bfloat16")
    mixer, ffn = spec.layers[0].mixer, spec.layers[0].ffn
    assert isinstance(mixer, GatedDeltaNet) and isinstance(ffn, DenseFFN)
    values = mixer.num_value_heads * mixer.value_dim

    def weight(n: int, k: int) -> Tensor:
        return torch.randn(n, k, dtype=torch.bfloat16, device="cuda") * k**-0.5

    return [
        Layer(
            weight(mixer.conv_channels + values + 2 * mixer.num_value_heads, spec.hidden_size),
            weight(spec.hidden_size, values),
            weight(2 * ffn.intermediate, spec.hidden_size),
            weight(spec.hidden_size, ffn.intermediate),
            torch.zeros(4, SHARED_TILES, dtype=torch.int32, device="cuda"),
        )
        for _ in range(LAYERS)
    ]


def denim(x: Tensor, weight: Tensor, norm: Tensor | None, arrivals: Tensor, **around: Any) -> Tensor:
    return small_product(x, weight, scale=norm, eps=EPS, arrivals=arrivals, **around)


def portable(x: Tensor, weight: Tensor, norm: Tensor | None, arrivals: Tensor, **around: Any) -> Tensor:
    gated = around.get("gated", False)
    n, k = weight.shape
    tiles = tiles_for(len(x), n // 2 if gated else n, k, gated=gated, width=x.element_size())
    return denim(x, weight, norm, arrivals, tiles=tiles, **around)


def cublas(
    x: Tensor, weight: Tensor, norm: Tensor | None, arrivals: Tensor, gated: bool = False, add: Any = None
) -> Tensor:
    """As Denim multiplies more rows."""
    if norm is not None:
        x = rms_norm(x, norm, EPS)
    if add is not None:
        return add.addmm_(x, weight.t())
    y = F.linear(x, weight)
    return silu_mul(y, 1.0) if gated else y


def chain(x: Tensor, layers: list[Layer], norm: Tensor, product: Product) -> Tensor:
    for layer in layers:
        projected = product(x, layer.into, norm, layer.arrivals[0])
        mixed = projected[:, : layer.out.shape[1]]
        x = product(mixed, layer.out, None, layer.arrivals[1], add=x)
        inner = product(x, layer.gate_up, norm, layer.arrivals[2], gated=True)
        x = product(inner, layer.down, None, layer.arrivals[3], add=x)
    return x


def measured(layers: list[Layer], limits: Floors) -> Iterator[Row]:
    weights = [weight for layer in layers for weight in layer[:4]]
    floor = limits.microseconds(sum(weight.nbytes for weight in weights)) / LAYERS
    norm = torch.ones(layers[0].out.shape[0], device="cuda")
    for rows in ROWS:
        given = torch.randn(rows, len(norm), dtype=torch.bfloat16, device="cuda")
        ways = {"Denim": denim, "portable": portable, "cuBLAS": cublas}
        for name, product in ways.items():
            if (rows, name) == (1, "portable"):
                continue  # the kernel of one row is the same everywhere

            def work(i: int, given: Tensor = given, product: Any = product) -> Tensor:
                return chain(given.clone(), layers, norm, product)

            yield Row("µs a layer", str(rows), name, microseconds(work, 1) / LAYERS, floor)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="qwen3.5-0.8b")
    args = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        limits = floors()
        rows = list(measured(layers_of(args.model), limits))
    print("\n".join(lines(rows)))
    save(
        args.json,
        "cuda",
        model=args.model,
        floors=limits._asdict(),
        rows=[row.as_json() for row in rows],
    )


if __name__ == "__main__":
    main()
