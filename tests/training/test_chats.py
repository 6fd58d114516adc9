"""Conversations in the mix read as the chat template renders them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import denim
from training.chats import KINDS, Turn, conversation, render
from training.data import Facts

FOLDER = Path(denim.__file__).parent / "weights" / "denim-tiny"
FACTS = Facts([["lamp", "noun", "a source of light"]], {"France": {"capital": "Paris"}})
TURNS = [Turn("Hello!", "A greeting.", "Hi."), Turn("What is 1 + 1?", "Easy.", "1 + 1 = 2.")]


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.mark.parametrize("system", ["", "Answer briefly."])
@pytest.mark.parametrize("thinking", [False, True])
def test_render_agrees_with_the_template(tokenizer, system: str, thinking: bool) -> None:
    messages = [{"role": "system", "content": system}] if system else []
    for turn in TURNS:
        messages.append({"role": "user", "content": turn.user})
        messages.append(
            {"role": "assistant", "content": f"<think>\n{turn.thinking}\n</think>\n\n{turn.answer}"}
        )
    opening, learned, after = render(system, TURNS, thinking)
    prompt = tokenizer.apply_chat_template(
        messages[:-1], tokenize=False, add_generation_prompt=True, enable_thinking=thinking
    )
    assert opening.text == prompt and not opening.learned
    if thinking:
        assert opening.text + learned.text + after.text == tokenizer.apply_chat_template(
            messages, tokenize=False
        )
    assert learned.learned and learned.text.endswith("<|im_end|>")


def test_a_tool_loop_keeps_the_thinking_behind_the_last_user_message(tokenizer) -> None:
    messages = [
        {"role": "user", "content": "old"},
        {"role": "assistant", "content": "<think>\nforgotten\n</think>\n\nyes"},
        {"role": "user", "content": "new"},
        {"role": "assistant", "content": "", "reasoning_content": "kept"},
        {"role": "tool", "content": "42"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert "forgotten" not in text and "<think>\nkept\n</think>" in text
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


def test_sums_and_days_are_right() -> None:
    kinds = {kind.__name__: kind for _, kind in KINDS}
    rng = np.random.default_rng(0)
    for _ in range(50):
        for name in ("_sum", "_difference", "_product"):
            left, right = kinds[name](rng, FACTS).answer.rstrip(".").split(" = ")
            assert eval(left) == int(right)
    assert sum(share for share, _ in KINDS) == pytest.approx(1.0)


def test_only_the_last_answer_is_learned() -> None:
    rng = np.random.default_rng(1)
    for _ in range(30):
        pieces = conversation(rng, FACTS)
        assert [piece.learned for piece in pieces] == [False, True, False]
        assert "<|im_start|>" not in pieces[1].text
