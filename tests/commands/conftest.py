"""A small model that speaks text, for the commands that run one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from denim.engine import LLM
from tests.tiny import checkpoint

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{{ '<think>\n' if enable_thinking else '' }}"
)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, one token a byte, a chat template; context of 4096 tokens."""
    folder = tmp_path_factory.mktemp("models") / "tiny-text"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    fast.chat_template = TEMPLATE
    checkpoint(folder, vocab_size=len(fast), eos_token_id=None)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def llm(model_folder: Path) -> LLM:
    return LLM(model_folder, device="cpu", memory="8MiB", max_num_seqs=4)
