"""LFM2: the state is the window of the short convolution alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import nn

from tests.families.row import VOCAB, Row, randomise


def save(folder: Path, *, conv_bias: bool = False, tied: bool = True) -> nn.Module:
    import transformers

    config = transformers.Lfm2Config(
        vocab_size=VOCAB,
        hidden_size=60,
        intermediate_size=100,
        block_multiple_of=7,
        block_ffn_dim_multiplier=1.3,
        num_hidden_layers=6,
        layer_types=["conv", "conv", "full_attention", "conv", "full_attention", "conv"],
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        conv_L_cache=4,
        conv_bias=conv_bias,
        tie_word_embeddings=tied,
        dtype="float32",
        eos_token_id=None,
    )
    model = randomise(transformers.Lfm2ForCausalLM(config), matrix=0.2)
    model.save_pretrained(folder)
    return model


ROWS = [
    Row(
        "lfm2",
        save,
        configs={
            "lfm2_350m.json": ("CCFCCFCCFCFCFCFC", 0.354),
            "lfm2_700m.json": ("CCFCCFCCFCFCFCFC", 0.742),
            "lfm2_1.2b.json": ("CCFCCFCCFCFCFCFC", 1.170),
            "lfm2_2.6b.json": ("CCFCCFCCCFCCCFCCCFCCCFCCFCCFCC", 2.57),
            "lfm2.5_2.6b.json": ("CCFCCFCCCFCCCFCCCFCCCFCCFCCFCC", 2.70),
        },
    ),
    Row("lfm2_biased", partial(save, conv_bias=True, tied=False)),
]
