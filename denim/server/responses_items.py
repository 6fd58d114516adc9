"""What a conversation in the Responses API is made of: messages, calls, their results, reasoning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator
from pydantic import Tag as UnionTag

from denim.server.base_model import ApiModel, Items
from denim.server.chat_schema import ContentPart, arguments_object


class MessageItem(ApiModel):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Items[ContentPart]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(ApiModel):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Annotated[str, AfterValidator(arguments_object)]
    id: str | None = None
    status: str | None = None
    namespace: str | None = None


class CallOutputItem(ApiModel):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Items[ContentPart]
    id: str | None = None
    status: str | None = None


class ReasoningPart(ApiModel):
    model_config = ConfigDict(extra="allow")

    type: str
    text: str


class ReasoningItem(ApiModel):
    type: Literal["reasoning"]
    summary: Items[ReasoningPart]
    content: Items[ReasoningPart] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: str | None = None


def _item_type(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return kind if isinstance(kind, str) else "message"


InputItem = Annotated[
    Annotated[MessageItem, UnionTag("message")]
    | Annotated[CallItem, UnionTag("function_call")]
    | Annotated[CallOutputItem, UnionTag("function_call_output")]
    | Annotated[ReasoningItem, UnionTag("reasoning")],
    Discriminator(_item_type),
]
