"""Recorded updates of whole slots reach the states of all layers, and of no other slot."""

from __future__ import annotations

import torch

from denim.memory.layout import ArenaLayout
from denim.memory.storage import Storage
from denim.recurrence.deferred import Ring
from denim.runner.flushing import flush_slots
from denim.spec.mixers import RECORD_ROLES
from tests.memory.test_layout import TINY


def test_all_layers_of_the_slots_that_are_named() -> None:
    torch.manual_seed(0)
    storage = Storage(ArenaLayout.of(TINY, page_size=4, records=3), 8, debug_poison=True)
    expected = {}
    for layer in TINY.linear_layers:
        state = storage.state(layer, "recurrent")
        ring = Ring(*(storage.state(layer, role) for role in RECORD_ROLES))
        for slot, records in ((1, 2), (2, 1), (5, 2)):
            state[slot] = torch.randn(state.shape[1:])
            for part in ring:
                part[slot, :records] = torch.randn(records, *part.shape[2:])
            ring.log_decays[slot, :records].abs_().neg_()
        expected[layer] = state.clone()
        group = TINY.layers[layer].mixer.num_value_heads // TINY.layers[layer].mixer.num_key_heads
        for slot, records in ((1, 2), (2, 1)):
            for j in range(records):
                expected[layer][slot] *= ring.log_decays[slot, j].exp().view(-1, 1, 1)
                keys = ring.keys[slot, j].repeat_interleave(group, 0)
                expected[layer][slot] += torch.einsum("hv,hk->hvk", ring.updates[slot, j], keys)
    flush_slots(storage, {1: 2, 2: 1})
    for layer, state in expected.items():
        torch.testing.assert_close(storage.state(layer, "recurrent"), state, equal_nan=True)
