"""The cost of deferred writes, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from denim.ledger.deferred import deferred_cost, ring_length
from denim.spec.illustrative import illustrative
from denim.spec.linear import KimiDelta, Lightning
from denim.spec.model import Layer

KIB = 2**10


def test_traffic_of_gated_delta() -> None:
    """A head of 128 x 128 in fp32 is 64 KiB; its record half a key, an update and a decay."""
    cost = deferred_cost(illustrative(), 8)
    assert cost is not None
    heads = 36 * 32
    record = 256 + 512 + 4
    # Over eight steps: eight reads of the state, one write, 0 + 1 + ... + 7 records read, 7 written.
    assert cost.step_bytes == pytest.approx(heads * (8 * 64 * KIB + 64 * KIB + (28 + 7) * record) / 8)
    assert heads * 128 * KIB / cost.step_bytes == pytest.approx(1.70, abs=0.01)


def test_ring_of_one_saves_nothing() -> None:
    cost = deferred_cost(illustrative(), 1)
    assert cost is not None
    assert cost.step_bytes == 36 * 32 * 128 * KIB


def test_length() -> None:
    """Beyond the length that is taken little is left to gain; where records are larger, less."""
    spec = illustrative()
    kimi = Layer(KimiDelta(32, 128, 128, 4, 128, 128), spec.layers[0].ffn)
    for model in (spec, replace(spec, layers=(kimi, spec.layers[3]))):
        assert ring_length(model) == 5
        moved = {length: deferred_cost(model, length).step_bytes for length in (3, 5, 9, 17)}
        assert moved[3] > moved[5] > moved[9] > moved[5] / 1.06
        assert moved[17] > moved[5] / 1.06


def test_rules_that_do_not_defer() -> None:
    spec = illustrative()
    layers = (Layer(Lightning(8, 64), spec.layers[0].ffn), spec.layers[3])
    assert deferred_cost(replace(spec, layers=layers), 8) is None
    assert ring_length(replace(spec, layers=layers)) == 0
