"""Where the next turn of a conversation will still agree with this prompt, read off the chat template.

Owns the dummy turns and the comparison. The template is the model author's program and may do anything with
older turns (drop their thinking, move tags); so it is asked: the conversation is rendered as it will look
later, and the longest common prefix of tokens is what later turns share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from denim.errors import RequestError

Message = Mapping[str, Any]
Render = Callable[[list[Message]], list[int]]
"""Messages to token ids, without a generation prompt; RequestError where the template refuses them."""

TEXTS = ("Yes.", "0")
"""Of dummy messages. Two that begin with different tokens: what both agree on does not depend on the text."""

SYSTEM_ROLES = ("system", "developer")


def chat_boundaries(render: Render, messages: Sequence[Message], prompt: Sequence[int]) -> list[int]:
    """Positions of `prompt`, the rendered `messages`, at which checkpoints pay, in order; 0 is left out.

    The end of the system part, which other conversations share; and the place where this conversation, after
    an answer and a new user message, leaves the prompt. Where the template strips thinking that is the opener
    behind the last user message, also in the middle of a tool loop, which keeps its thinking until then.
    """
    head = 0
    while head < len(messages) and messages[head].get("role") in SYSTEM_ROLES:
        head += 1
    system = [[*messages[:head], {"role": "user", "content": text}] for text in TEXTS] if head else []
    later = [
        [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": text}]
        for text in TEXTS
    ]
    found = {_shared(render, variants, prompt) for variants in (system, later)}
    return sorted(position for position in found if 0 < position < len(prompt))


def marked_positions(render: Render, messages: Sequence[Message], prompt: Sequence[int]) -> list[int]:
    """Ends of the messages that carry `cache_control`, as positions of `prompt`: what the conversation up to
    there shares with it."""
    found = {
        _shared(render, [list(messages[: place + 1])], prompt)
        for place, message in enumerate(messages)
        if message.get("cache_control")
    }
    return sorted(position for position in found if 0 < position < len(prompt))


def _shared(render: Render, variants: list[list[Message]], prompt: Sequence[int]) -> int:
    """Tokens that the prompt shares with all of `variants`; 0 when the template refuses one."""
    shared = len(prompt) if variants else 0
    for messages in variants:
        try:
            tokens = render(messages)
        except RequestError:
            return 0
        length = min(shared, len(tokens))
        shared = next((at for at in range(length) if tokens[at] != prompt[at]), length)
    return shared
