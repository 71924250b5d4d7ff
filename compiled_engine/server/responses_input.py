"""The input of /v1/responses as the messages and tools of a chat."""

from __future__ import annotations

from typing import Any

from compiled_engine.server.chat_messages import (
    ChatMessage,
    FunctionCall,
    FunctionDefinition,
    MessageToolCall,
    Tool,
)
from compiled_engine.server.errors import ApiError, bad_request, shown
from compiled_engine.server.request_fields import convert

TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
ROLES = ("system", "developer", "user", "assistant")


def messages_of(given: Any, instructions: str | None) -> list[ChatMessage]:
    """Calls, and the reasoning before them, become part of the assistant's message. Raises ApiError 400 naming the
    item that is wrong."""
    messages = [] if instructions is None else [ChatMessage(role="system", content=instructions)]
    if isinstance(given, str):
        return [*messages, ChatMessage(role="user", content=given)]
    if not isinstance(given, list) or not given:
        raise bad_request("input", f"input must be text, or a list of items that is not empty, got {shown(given)}")
    reasoning: str | None = None
    for index, item in enumerate(given):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise bad_request(where, f"{where} must be an object, got {shown(item)}")
        kind = "message" if item.get("type") is None else item["type"]
        if kind == "message":
            messages.append(_message(where, item))
        elif kind == "function_call_output":
            output = _text(f"{where}.output", item.get("output"))
            messages.append(ChatMessage(role="tool", content=output, tool_call_id=_name(where, item, "call_id")))
        elif kind == "function_call":
            _assistant(messages).tool_calls.append(_call(where, item))  # type: ignore[union-attr]
        elif kind == "reasoning":
            reasoning = _text(f"{where}.content", item.get("content") or item.get("summary") or "")
            continue
        else:
            raise _unsupported(where, kind)
        if reasoning and messages[-1].role == "assistant":
            messages[-1].reasoning_content = reasoning
        reasoning = None
    return messages


def tools_of(given: list[dict[str, Any]] | None, ignored: list[str]) -> list[Tool] | None:
    """The functions among the tools; `ignored` gets the others, which the model need not call."""
    tools: list[Tool] = []
    for index, tool in enumerate(given or ()):
        if tool.get("type") == "function":
            fields = {key: value for key, value in tool.items() if value is not None}
            tools.append(Tool(type="function", function=convert(fields, FunctionDefinition, f"tools[{index}].")))
        else:
            ignored.append(f"tools[{index}] of type {shown(tool.get('type'))} is ignored: only functions are supported")
    return tools or None


def _message(where: str, item: dict[str, Any]) -> ChatMessage:
    role = item.get("role")
    if role not in ROLES:
        raise bad_request(f"{where}.role", f"{where}.role must be one of {', '.join(ROLES)}, got {shown(role)}")
    tool_calls: list[MessageToolCall] | None = [] if role == "assistant" else None
    content = _text(f"{where}.content", item.get("content"))
    return ChatMessage(role=role, content=content, tool_calls=tool_calls)  # type: ignore[arg-type]


def _assistant(messages: list[ChatMessage]) -> ChatMessage:
    """The assistant's message at the end, a new one if there is none."""
    if not messages or messages[-1].role != "assistant":
        messages.append(ChatMessage(role="assistant", content="", tool_calls=[]))
    return messages[-1]


def _call(where: str, item: dict[str, Any]) -> MessageToolCall:
    arguments = item.get("arguments")
    if not isinstance(arguments, str):
        name = f"{where}.arguments"
        raise bad_request(name, f"{name} must be a JSON object as text, got {shown(arguments)}")
    function = FunctionCall(name=_name(where, item, "name"), arguments=arguments)
    return MessageToolCall(id=_name(where, item, "call_id"), type="function", function=function)


def _name(where: str, item: dict[str, Any], key: str) -> str:
    value = item.get(key)
    if not isinstance(value, str) or not value:
        raise bad_request(f"{where}.{key}", f"{where}.{key} must be text, got {shown(value)}")
    return value


def _text(where: str, content: Any) -> str:
    """Text, or the text of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(where, f"{where} must be text or a list of parts, got {shown(content)}")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else part
        if kind == "refusal":
            continue
        if kind not in TEXT_PARTS:
            raise _unsupported(f"{where}[{index}]", kind)
        texts.append(_text(f"{where}[{index}].text", part.get("text")))
    return "\n".join(texts)


def _unsupported(where: str, kind: Any) -> ApiError:
    return bad_request(where, f"{where} of type {shown(kind)} is not supported", code="unsupported_parameter")
