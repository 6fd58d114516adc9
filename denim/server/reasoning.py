"""Where a model's reasoning begins and ends: between <think> and </think>, in every served family.

Whether a reply begins inside reasoning is decided by the prompt that was rendered for it, not by what was
asked for: a template may open the block, close it at once, or leave it to the model.
"""

from __future__ import annotations

OPEN = "<think>"
CLOSE = "</think>"


def knows_reasoning(chat_template: str) -> bool:
    """Whether a template has anything to do with reasoning."""
    return CLOSE in chat_template


def may_begin(prompt: str, chat_template: str) -> bool:
    """Whether a reply to the rendered `prompt` may open reasoning itself: the prompt has neither opened nor
    closed it."""
    return knows_reasoning(chat_template) and not prompt.rstrip().endswith((OPEN, CLOSE))


def begins_inside(prompt: str) -> bool:
    """Whether a reply to the rendered `prompt` begins inside reasoning."""
    return prompt.rstrip().endswith(OPEN)
