"""Input of the Responses API as messages, which templates know.

Owns the way from items to messages: what an assistant thought, said and called lies in items of its own
there, and in one message here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from denim.server.conversation import Conversation, options_with_effort, prepared
from denim.server.reply_form import ToolChoice
from denim.server.responses_items import CallItem, CallOutputItem, InputItem, MessageItem, ReasoningItem
from denim.server.responses_schema import ResponsesNamedTool, ResponsesRequest

Message = dict[str, Any]


def conversation_of(body: ResponsesRequest) -> Conversation:
    """Raises ApiError for what cannot be rendered."""
    messages: list[Message] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    items = [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    messages += _messages(items)
    tools = [
        {
            "type": "function",
            "function": tool.model_dump(exclude_none=True, exclude={"type"}),
        }
        for tool in body.tools or ()
    ]
    effort = body.reasoning.effort if body.reasoning else None
    options = options_with_effort(body.chat_template_kwargs, effort)
    named = body.tool_choice.name if isinstance(body.tool_choice, ResponsesNamedTool) else None
    choice = ToolChoice(body.tool_choice == "required", named, body.parallel_tool_calls is False)
    offered = [] if body.tool_choice == "none" else tools
    return prepared(messages, offered, options, choice, prompt_field="input")


def _messages(items: Sequence[InputItem]) -> list[Message]:
    messages: list[Message] = []
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                _assistant(messages, "content")["content"] = _content(item)
            case MessageItem():
                messages.append({"role": item.role, "content": _content(item)})
            case CallOutputItem():
                output = item.output if isinstance(item.output, str) else _parts(item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
            case ReasoningItem():
                texts = [part.text for part in item.content or item.summary]
                _assistant(messages, "reasoning_content", "content", "tool_calls")["reasoning_content"] = (
                    "\n".join(texts)
                )
            case CallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "function": function}
                _assistant(messages).setdefault("tool_calls", []).append(call)
    return messages


def _assistant(messages: list[Message], *absent: str) -> Message:
    """The assistant's message that is being put together; a new one if it has one of `absent` already."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or any(last.get(name) for name in absent):
        last = {"role": "assistant"}
        messages.append(last)
    return last


def _content(item: MessageItem) -> str | list[Message]:
    return item.content if isinstance(item.content, str) else _parts(item.content)


def _parts(parts: Sequence[Any]) -> list[Message]:
    return [part.model_dump(exclude_none=True) for part in parts]
