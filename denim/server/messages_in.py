"""Anthropic's conversations in the form of OpenAI's, which templates know.

Owns the way from blocks to messages: results of tools become messages of their own, uses of tools become
calls, thinking becomes reasoning, marks stay where they were.
"""

from __future__ import annotations

from typing import Any

from denim.server.conversation import Conversation, prepared
from denim.server.messages_schema import (
    AnthropicMessage,
    AnthropicTool,
    MessageFields,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from denim.server.reply_form import ToolChoice

Message = dict[str, Any]


def conversation_of(body: MessageFields) -> Conversation:
    """Raises ApiError for what cannot be rendered."""
    messages: list[Message] = []
    if body.system:
        messages.append({"role": "system", "content": _content(body.system)})
    for message in body.messages:
        messages += _messages(message)
    if body.cache_control is not None and messages:
        messages[-1]["cache_control"] = True
    wants_tools = body.tool_choice is None or body.tool_choice.type != "none"
    tools = [_tool(tool) for tool in body.tools or ()] if wants_tools else []
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    options: dict[str, Any] = {"enable_thinking": thinks}
    if body.output_config is not None and body.output_config.effort is not None:
        options["reasoning_effort"] = body.output_config.effort
    return prepared(messages, tools, options | (body.chat_template_kwargs or {}), _choice(body))


def _choice(body: MessageFields) -> ToolChoice:
    asked = body.tool_choice
    if asked is None:
        return ToolChoice()
    return ToolChoice(asked.type == "any", asked.name, bool(asked.disable_parallel_tool_use))


def _content(content: str | list[TextBlock]) -> str | list[Message]:
    return content if isinstance(content, str) else [_text_part(block) for block in content]


def _text_part(block: TextBlock) -> Message:
    part: Message = {"type": "text", "text": block.text}
    return part | ({"cache_control": True} if block.cache_control else {})


def _messages(message: AnthropicMessage) -> list[Message]:
    """One message of theirs: first the results of tools in it, then the rest."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[Message] = []
    rest: Message = {"role": message.role, "content": []}
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            results.append(_result(block))
        elif isinstance(block, ToolUseBlock):
            call = {"id": block.id, "function": {"name": block.name, "arguments": block.input}}
            rest.setdefault("tool_calls", []).append(call)
            if block.cache_control:
                rest["cache_control"] = True
        elif isinstance(block, ThinkingBlock):
            rest["reasoning_content"] = rest.get("reasoning_content", "") + block.thinking
        elif isinstance(block, TextBlock):
            rest["content"].append(_text_part(block))
    if len(rest) > 2 or rest["content"] or not results:
        return [*results, rest]
    return results


def _result(block: ToolResultBlock) -> Message:
    message: Message = {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "content": _content(block.content or ""),
    }
    if block.cache_control:
        message["cache_control"] = True
    return message


def _tool(tool: AnthropicTool) -> Message:
    function: Message = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}
