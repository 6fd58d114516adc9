"""Records of a value head that its state does not hold yet: `update_ring` for kernels on Hopper.

Owns how they are loaded, faded and stored. They come newest first, [records, DIM] with zeros behind the
oldest; a thread has all of a channel, so that decays are summed where they lie, from the latest back
(`update_ring` says why). Knows slots; neither states nor the layer.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from denim.recurrence.kernels.exponentials import exp
from denim.recurrence.kernels.state_ring import DIM


@gluon.jit
def load_records(
    records,
    head,
    by_channel,
    by_record,
    key_heads: gl.constexpr,
    group: gl.constexpr,
    vector_decay: gl.constexpr,
):
    """(keys, the log-decay of the record behind each, that of the oldest, updates) of a value head. records:
    pointer and slot stride of each tensor of a ring; by_channel, by_record: (record, channel) as keys and
    decays, and as updates lie."""
    keys_ptr, keys_stride, updates_ptr, updates_stride, decays_ptr, decays_stride = records
    unit, i, slot, pending = head
    key_head = unit % key_heads
    value_head = key_head * group + i
    value_heads: gl.constexpr = key_heads * group
    decay_dim: gl.constexpr = DIM if vector_decay else 1
    n, channel = by_channel
    there = (n < pending) & (channel >= 0)[None, :]
    keys = keys_ptr + slot * keys_stride + key_head * DIM + channel[None, :]
    keys = gl.load(keys + (pending - 1 - n) * (key_heads * DIM), mask=there, other=0.0)
    decays = decays_ptr + slot * decays_stride + value_head * decay_dim
    decays = decays + (channel if vector_decay else channel * 0)
    oldest = gl.load(decays, mask=(channel >= 0) & (pending > 0), other=0.0)
    decays = decays[None, :] + (pending - n) * (value_heads * decay_dim)
    later = gl.load(decays, mask=there & (n > 0), other=0.0)
    n, channel = by_record
    updates = updates_ptr + slot * updates_stride + value_head * DIM + channel
    updates = updates + (pending - 1 - n) * (value_heads * DIM)
    return keys, later, oldest, gl.load(updates, mask=(n < pending) & (channel >= 0), other=0.0)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def faded(keys, later, oldest, log_decay):
    """(the keys, each behind all later decays; the state's log-decay [DIM]). log_decay: the step's own, a
    number or [DIM]."""
    behind = gl.associative_scan(later, 0, _add)
    if log_decay.type.is_block():
        behind += log_decay[None, :]
    else:
        behind += log_decay
    return keys * exp(behind), gl.sum(later, 0) + oldest + log_decay


@gluon.jit
def store_record(
    records,
    head,
    own,
    whole,
    spread,
    key_heads: gl.constexpr,
    group: gl.constexpr,
    vector_decay: gl.constexpr,
):
    """The record of a step, behind those that are pending; the key for the first value head of a key head.
    own: (key, as `spread`; update, as `whole`; log-decay)."""
    key, update, log_decay = own
    keys_ptr, keys_stride, updates_ptr, updates_stride, decays_ptr, decays_stride = records
    unit, i, slot, pending = head
    key_head = unit % key_heads
    at = pending * (key_heads * group) + key_head * group + i
    keys = keys_ptr + slot * keys_stride + (pending * key_heads + key_head) * DIM
    gl.store(keys + spread, key, mask=(spread >= 0) & (i == 0))
    gl.store(updates_ptr + slot * updates_stride + at * DIM + whole, update)
    decays = decays_ptr + slot * decays_stride
    if vector_decay:
        gl.store(decays + at * DIM + spread, log_decay)
    else:
        gl.store(decays + at, log_decay)
