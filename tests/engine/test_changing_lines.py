"""PN-14: a line that changes with every request, and the rule that leaves it out."""

from __future__ import annotations

import random
from typing import Any

import pytest

from denim import LLM, ConfigError, SamplingParams
from denim.engine.changing_lines import ChangingLines

RULE = ChangingLines([r"^x-checksum: [0-9a-f]+$", "now:"])
TEXT = "First.\nx-checksum: 0aff\nSecond.\nIt is now: 12:30\nThird."


def test_lines_are_left_out_of_system_messages_alone() -> None:
    system, user = {"role": "system", "content": TEXT}, {"role": "user", "content": TEXT}
    assert RULE.without([system, user]) == [{"role": "system", "content": "First.\nSecond.\nThird."}, user]
    assert system["content"] == TEXT
    parts = {"role": "developer", "content": [{"type": "text", "text": TEXT}, {"type": "other"}]}
    (stripped,) = RULE.without([parts])
    assert stripped["content"] == [{"type": "text", "text": "First.\nSecond.\nThird."}, {"type": "other"}]
    empty = {"role": "system", "content": None}
    assert RULE.without([empty]) == [empty]


def test_marks_inside_a_message_move_with_its_text() -> None:
    places = [TEXT.index("First.") + 6, TEXT.index("aff"), TEXT.index("Second.") + 7, len(TEXT)]
    (stripped,) = RULE.without([{"role": "system", "content": TEXT, "cache_control": places}])
    kept = "First.\nSecond.\nThird."
    assert stripped["cache_control"] == [6, 7, kept.index("Second.") + 7, len(kept)]


@pytest.mark.parametrize("patterns", [["("], [3]])
def test_what_is_no_expression(patterns: Any) -> None:
    with pytest.raises(ConfigError, match="no regular expression"):
        LLM(memory="1MiB", device="cpu", strip_lines=patterns)


def cached_of_turns(**options: Any) -> tuple[list[int], list[int], dict[str, Any]]:
    """Five turns of a chat whose system text begins with a random value, in each request another one: tokens
    cached, tokens of the prompts, and the account."""
    llm = LLM(memory="32MiB", max_model_len=2048, device="cpu", **options)
    chance = random.Random(0)
    fixed = "You answer in few words, and never say more than is asked. " * 24
    messages, cached, lengths = [], [], []
    for turn in range(5):
        messages.append({"role": "user", "content": f"Question {turn}: what is it?"})
        system = {"role": "system", "content": f"x-checksum: {chance.getrandbits(64):016x}\n{fixed}"}
        (output,) = llm.chat([system, *messages], SamplingParams(temperature=0, max_tokens=8))
        messages.append({"role": "assistant", "content": output.outputs[0].text})
        cached.append(output.num_cached_tokens)
        lengths.append(len(output.prompt_token_ids))
    return cached, lengths, llm.stats()["prefix"]


def test_a_checksum_in_the_system_text_is_seen_and_can_be_left_out() -> None:
    cached, lengths, account = cached_of_turns()
    assert max(cached) < 64  # what stands before the line is shorter than a checkpoint is worth
    assert account["query_tokens"] == sum(lengths) and account["hit_tokens"] == sum(cached)
    cached, lengths, _ = cached_of_turns(strip_lines=["^x-checksum: "])
    assert cached[0] == 0
    for turn in range(1, 5):  # all of the last prompt up to where its generation began
        assert lengths[turn - 1] - 2 == cached[turn]
