"""What a model costs, computed from its spec alone. Pure Python: never imports torch."""

from denim.ledger.cost import LENGTHS, Ledger, ledger_json, ledger_of
from denim.ledger.flops import decode_flops, prefill_flops
from denim.ledger.parameters import Parameters, count_parameters, weight_bytes

__all__ = [
    "LENGTHS",
    "Ledger",
    "Parameters",
    "count_parameters",
    "decode_flops",
    "ledger_json",
    "ledger_of",
    "prefill_flops",
    "weight_bytes",
]
