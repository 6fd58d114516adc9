"""denim-tiny's own byte-level BPE and the folder that holds it.

Owns the vocabulary's size, its special tokens and the rule that splits text before merging. Knows nothing
of the model. The splitting rule is that of Qwen (single digits, words with a leading blank, runs of
punctuation, line ends); see the `pre_tokenizer` of its published tokenizer.json.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 6144
END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
# These have the ids 0 to 4. The thinking marks are one token each but ordinary text, as in Qwen's tokenizer:
# `skip_special_tokens` leaves them in.
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
THINKING_TOKENS = ("<think>", "</think>")
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def train(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer of `VOCABULARY` entries merged from `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[
            AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS + THINKING_TOKENS
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] in SPECIAL_TOKENS
    return Tokenizer.from_str(json.dumps(state))


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja, as transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "bos_token": None,
        "unk_token": None,
        "additional_special_tokens": [TURN_START],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copyfile(TEMPLATE, folder / "chat_template.jinja")


def load(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
