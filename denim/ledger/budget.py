"""What of a device's memory is left for the arena when no size is given: the defaults and the working memory.

Owns the numbers that engine and plan share. Knows specs; devices only by their kind, "cpu" or "cuda".
"""

from __future__ import annotations

from denim.ledger.devices import Device
from denim.ledger.parameters import weight_bytes
from denim.spec.model import ModelSpec

DEFAULT_NUM_SEQS = 256  # vLLM's default max_num_seqs
DEFAULT_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}
HOST_SHARE = 0.25  # of the free host memory, at most, when a CPU engine is given no size
DEVICE_SHARE = 0.9  # of a CUDA device, weights included, when no size is given; vLLM's default
RESERVE = 1.5  # working memory of a step against its largest tensors; covers fragmentation


def arena_budget(spec: ModelSpec, device: Device, chunk: int, share: float | None) -> int:
    """Bytes for the arena on an otherwise empty `device`; negative: too small.

    `share`: of the whole device, weights and working memory included; None: the engine's defaults. What the
    driver keeps for itself is not known here.
    """
    weights = weight_bytes(spec, fp8_blocks=device.fp8_blocks)
    if device.kind == "cpu" and share is None:
        return int((device.memory_bytes - weights) * HOST_SHARE)
    working = working_bytes(spec, DEFAULT_BATCHED_TOKENS[device.kind], DEFAULT_NUM_SEQS, chunk)
    return int(device.memory_bytes * (DEVICE_SHARE if share is None else share)) - weights - working


def working_bytes(spec: ModelSpec, tokens: int, rows: int, chunk: int) -> int:
    """A bound on what one step of `tokens` tokens and `rows` sampled rows allocates beside the arena.

    The largest layer's fp32 intermediates (for a matrix state [heads, d_v, d_k] the tokens' keys, values
    and their scaled copies, and the chunk-by-chunk matrices; for a scan [channels, N] its inputs), the
    widest product, and three copies of the logits.
    """
    per_token = 8 * spec.hidden_size
    for layer in spec.layers:
        for state in layer.mixer.state_tensors(spec.state_dtype, spec.dtype):
            if state.role != "recurrent":
                continue
            if len(state.shape) == 3:
                heads, value_dim, key_dim = state.shape
                per_token = max(per_token, heads * (6 * key_dim + 5 * value_dim + 5 * chunk))
            else:
                per_token = max(per_token, 8 * state.shape[0])
    return int(RESERVE * 4 * (tokens * per_token + 3 * rows * spec.vocab_size))
