"""Which quantised checkpoints are read: FP8 weights with one scale a block, and no other.

Owns the meaning of `quantization_config`. What is multiplied as it is and what is dequantised, the loader
decides (`denim.models.weights`).
"""

from __future__ import annotations

from denim.spec.fields import Fields

READ = "FP8 weights in blocks (quant_method fp8, fmt e4m3, weight_block_size [128, 128]), or no such key"


def read_weight_blocks(fields: Fields) -> tuple[int, int] | None:
    """Rows and columns of a block of FP8 weights that share one scale; None: nothing is quantised.

    Which projections are quantised, the files say: those of FP8 type with a scale beside them, whatever
    `modules_to_not_convert` lists. Raises ConfigError for other formats.
    """
    values = fields.get("quantization_config")
    if values is None:
        return None
    if not isinstance(values, dict) or values.get("quant_method") != "fp8":
        raise fields.error("quantization_config", READ)
    section = fields.section("quantization_config")
    section.ignore("quant_method", "modules_to_not_convert", "ignored_layers", "dequantize")
    section.demand("fmt", ["e4m3"])
    section.demand("scale_fmt", ["float"])
    section.demand("activation_scheme", ["dynamic"])
    block = section.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise section.error("weight_block_size", "two positive integers such as [128, 128]")
    section.finish()
    return block[0], block[1]
