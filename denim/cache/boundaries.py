"""Where the next turn of a conversation will still agree with this prompt, read off the chat template.

Owns the dummy turns and the comparison. The template is the model author's program and may do anything with
older turns (drop their thinking, move tags); so it is asked: the conversation is rendered as it will look
later, and the longest common prefix of tokens is what later turns share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from denim.cache.tree import common_length
from denim.errors import RequestError

Message = Mapping[str, Any]

TEXTS = ("Yes.", "0")
"""Of dummy messages. Two that begin with different tokens: what both agree on does not depend on the text."""

SYSTEM_ROLES = ("system", "developer")

AHEAD = 256
"""Characters behind the place where two texts part that are tokenised with it: more than a token has."""


class ChatText(NamedTuple):
    """A rendered conversation, and how its model renders and tokenises.

    render: messages to text, without a generation prompt; RequestError where the template refuses them.
    encode: text to token ids. specials: texts of special tokens that the prompt has; a tokenizer cuts a text
    at each of them before it does anything else, so what lies between two of them can be tokenised by itself.
    has_tools: whether the template writes tools, which are part of the system's part.
    """

    text: str
    tokens: list[int]
    render: Callable[[list[Message]], str]
    encode: Callable[[str], list[int]]
    specials: Sequence[str]
    has_tools: bool = False


def chat_boundaries(chat: ChatText, messages: Sequence[Message]) -> list[int]:
    """Positions of the prompt, the rendered `messages`, at which checkpoints pay, in order; 0 is left out.

    The end of the system part, which other conversations share; and the place where this conversation, after
    an answer and a new user message, leaves the prompt. Where the template strips thinking that is the opener
    behind the last user message, also in the middle of a tool loop, which keeps its thinking until then.
    """
    head = 0
    while head < len(messages) and messages[head].get("role") in SYSTEM_ROLES:
        head += 1
    apart = head or chat.has_tools  # whether anything stands before the first user message
    system = [[*messages[:head], {"role": "user", "content": text}] for text in TEXTS] if apart else []
    later = [
        [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": text}]
        for text in TEXTS
    ]
    return _inside(chat, {_shared(chat, variants) for variants in (system, later)})


def marked_positions(chat: ChatText, messages: Sequence[Message]) -> list[int]:
    """What messages mark themselves, as positions of the prompt: what the conversation up to there shares
    with it. `cache_control` of a message is a list of places in its content, in characters; anything else
    that is true marks its end."""
    positions = set()
    for place, message in enumerate(messages):
        marks = message.get("cache_control")
        for mark in marks if isinstance(marks, list) else [None] if marks else []:
            last = message if mark is None else {**message, "content": message["content"][:mark]}
            positions.add(_shared(chat, [[*messages[:place], last]]))
    return _inside(chat, positions)


def _inside(chat: ChatText, positions: set[int]) -> list[int]:
    return sorted(position for position in positions if 0 < position < len(chat.tokens))


def _shared(chat: ChatText, variants: list[list[Message]]) -> int:
    """Tokens that the prompt shares with all of `variants`; 0 when the template refuses one."""
    shared = len(chat.tokens) if variants else 0
    for messages in variants:
        try:
            text = chat.render(messages)
        except RequestError:
            return 0
        shared = min(shared, _shared_with(chat, text))
    return shared


def _shared_with(chat: ChatText, other: str) -> int:
    """Tokens that the prompt shares with another text.

    Only the surroundings of the place where the texts part are tokenised, from the last special token before
    it on, and what is shorter of the rest of the prompt: a history of 32k tokens takes tens of milliseconds.
    """
    parting = common_length(chat.text, other, 0)
    begin = max((chat.text.rfind(special, 0, parting) for special in chat.specials), default=0)
    begin = max(0, begin)
    before, behind = chat.text[:begin], chat.text[begin:]
    if len(before) < len(behind):
        first = len(chat.encode(before)) if before else 0
    else:
        first = len(chat.tokens) - len(chat.encode(behind))
    mine, theirs = (chat.encode(text[begin : parting + AHEAD]) for text in (chat.text, other))
    length = common_length(mine, theirs, 0)
    if chat.tokens[first : first + length] == mine[:length]:
        return first + length
    return common_length(chat.tokens, chat.encode(other), 0)  # this tokenizer does not cut there
