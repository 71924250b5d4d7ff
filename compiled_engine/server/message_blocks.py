"""Bodies of requests of /v1/messages and /v1/messages/count_tokens, and the chat that they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from compiled_engine.server.chat_format import ChatFormat
from compiled_engine.server.chat_messages import (
    ChatMessage,
    ContentPart,
    FunctionCall,
    FunctionDefinition,
    MessageToolCall,
    Name,
    Tool,
)
from compiled_engine.server.errors import bad_request, require, require_absent, require_at_most, shown
from compiled_engine.server.options import Limits
from compiled_engine.server.protocol import ChatRequest
from compiled_engine.server.request_fields import HABITS, REFUSED, Refused, refused
from compiled_engine.server.sampling_fields import SAME, SamplingFields

MESSAGES_REFUSED: dict[str, Refused] = {
    **REFUSED,
    **refused(container=(), mcp_servers=([],), context_management=({"edits": []}, {})),
    **refused("give output_config with a format", response_format=()),
    **refused("give output_config with an effort", reasoning_effort=()),
}
MESSAGES_HABITS = HABITS | {"inference_geo", "cache_control", "betas", "anthropic_beta"}
# Fields of sampling whose results a message has no place for, with the values that ask for nothing.
WITHOUT_PLACE: dict[str, tuple[Any, ...]] = {"n": (1,), "prompt_logprobs": (), "return_token_ids": (False,)}
# Variables of chat templates that turn reasoning on and off.
THINKING = ("enable_thinking", "thinking")
# One client begins its instructions with a block for billing, whose hash is new in each request: it is not for the
# model, and no prefix behind it would ever be found in the cache.
NOT_FOR_THE_MODEL = "x-anthropic-billing-header"


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """Text."""

    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """Reasoning before an answer. signature: no meaning here; clients send it back."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="redacted_thinking"):
    """Reasoning that another server encrypted; ignored."""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: Name
    input: Any


class ToolResultBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_result"):
    """The result of the call `tool_use_id`."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(msgspec.Struct, kw_only=True):
    """A message. Blocks of the assistant are text, thinking and tool_use, those of the user text and tool_result."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessagesTool(msgspec.Struct, kw_only=True):
    """A tool of the client's; type: "custom" or absent. Tools that a server runs are ignored."""

    name: Name
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class MessagesToolChoice(msgspec.Struct, kw_only=True):
    """type: whether tools are called; name: of the tool, with type "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model reasons first, if its chat template has a variable for that; budget_tokens: most tokens."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None


class SchemaFormat(msgspec.Struct, kw_only=True):
    """The answer is JSON that conforms to the schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """effort: of the reasoning, for templates that read reasoning_effort."""

    effort: str | None = None
    format: SchemaFormat | None = None


class CountTokensRequest(SamplingFields, kw_only=True):
    """messages: the conversation; an assistant's text at its end is continued. system: instructions.

    thinking, output_config: as Anthropic's clients give them. chat_template_kwargs, and parameters of sampling by their
    names in other endpoints, are taken as well.
    """

    messages: list[InputMessage]
    system: str | list[TextBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """The same, with what to generate. stop_sequences: strings that end the answer."""

    max_tokens: Annotated[int, Meta(ge=1)]
    stop_sequences: list[Annotated[str, Meta(min_length=1)]] | None = None


def as_chat(fields: CountTokensRequest, chat: ChatFormat, limits: Limits, ignored: list[str]) -> ChatRequest:
    """The request in the terms of chats; `ignored` gets a warning for each part without effect. Raises ApiError 400 for
    what is not supported, naming the field."""
    for name, nothing in WITHOUT_PLACE.items():
        if (value := getattr(fields, name)) not in nothing:
            require_absent(name, value, "as a message has no place for its result")
    require_at_most("messages", fields.messages, limits.max_messages, "messages")
    require_at_most("messages", sum(map(_num_blocks, fields.messages)), limits.max_messages, "blocks")
    require_at_most("system", fields.system if isinstance(fields.system, list) else (), limits.max_messages, "blocks")
    require_at_most("tools", fields.tools, limits.max_tools, "tools")
    choice = fields.tool_choice
    config = fields.output_config or OutputConfig()
    return ChatRequest(
        **{name: getattr(fields, name) for name in SAME} | {"stop": _stop(fields, limits)},
        logit_bias=fields.logit_bias,
        stream=fields.stream,
        messages=_messages(fields),
        tools=_tools(fields.tools, ignored),
        tool_choice=None if choice is None else _tool_choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        response_format=None if config.format is None else msgspec.to_builtins(config.format),
        reasoning_effort=config.effort,
        continue_final_message=_ends_with_text(fields.messages) or None,
        chat_template_kwargs=_settings(fields, chat, ignored),
        thinking_token_budget=None if fields.thinking is None else fields.thinking.budget_tokens,
    )


def _num_blocks(message: InputMessage) -> int:
    """Return the number of blocks, those within results of tools included."""
    content = message.content
    if isinstance(content, str):
        return 0
    results = (block.content for block in content if isinstance(block, ToolResultBlock))
    return len(content) + sum(len(result) for result in results if isinstance(result, list))


def _stop(fields: CountTokensRequest, limits: Limits) -> Any:
    if not isinstance(fields, MessagesRequest) or fields.stop_sequences is None:
        return fields.stop
    require_absent("stop", fields.stop, "where there are stop_sequences")
    require_at_most("stop_sequences", fields.stop_sequences, limits.max_stop, "strings")
    for text in fields.stop_sequences:
        require_at_most("stop_sequences", text, limits.max_stop_length, "characters in a string")
    return fields.stop_sequences


def _settings(fields: CountTokensRequest, chat: ChatFormat, ignored: list[str]) -> dict[str, Any] | None:
    """Return the template's variables. `thinking` is one of them in other words."""
    if fields.thinking is None:
        return fields.chat_template_kwargs
    names = [name for name in THINKING if name in chat.allowed_settings and chat.knows(name)]
    if not names:
        ignored.append("thinking is ignored: this model's chat template has no variable for it")
    return dict.fromkeys(names, fields.thinking.type != "disabled") | (fields.chat_template_kwargs or {})


def _messages(fields: CountTokensRequest) -> list[ChatMessage]:
    """All instructions come first, in one message: few chat templates take them elsewhere."""
    instructions = _instructions("system", fields.system or "")
    messages: list[ChatMessage] = []
    for index, message in enumerate(fields.messages):
        where = f"messages[{index}].content"
        if message.role == "system":
            instructions += _instructions(where, message.content)
        elif message.role == "assistant":
            messages.append(_of_assistant(where, message.content))
        else:
            messages += _of_user(where, message.content)
    return [ChatMessage(role="system", content=instructions), *messages] if instructions else messages


def _instructions(where: str, content: str | Sequence[Block]) -> list[ContentPart]:
    if isinstance(content, str):
        texts = [content]
    else:
        texts = [_text(f"{where}[{index}]", block) for index, block in enumerate(content)]
    return [_part(text) for text in texts if text and not text.startswith(NOT_FOR_THE_MODEL)]


def _of_assistant(where: str, content: str | list[Block]) -> ChatMessage:
    if isinstance(content, str):
        return ChatMessage(role="assistant", content=content)
    message = ChatMessage(role="assistant", content="", tool_calls=[])
    parts: list[ContentPart] = []
    reasoning: list[str] = []
    for index, block in enumerate(content):
        match block:
            case ThinkingBlock(thinking=text):
                reasoning.append(text)
            case ToolUseBlock(id=id, name=name, input=given):
                require(isinstance(given, dict), f"{where}[{index}].input", "an object", given, param=where)
                function = FunctionCall(name=name, arguments=given)
                message.tool_calls.append(MessageToolCall(id=id, type="function", function=function))  # type: ignore[union-attr]
            case RedactedThinkingBlock():
                pass
            case _:
                parts.append(_part(_text(f"{where}[{index}]", block)))
    message.content = parts
    message.reasoning_content = "\n".join(reasoning) or None
    return message


def _of_user(where: str, content: str | list[Block]) -> list[ChatMessage]:
    """Results of tools are messages of their own; text around them stays in its place."""
    if isinstance(content, str):
        return [ChatMessage(role="user", content=content)]
    messages: list[ChatMessage] = []
    for index, block in enumerate(content):
        if isinstance(block, ToolResultBlock):
            result = block.content or ""
            parts = result if isinstance(result, str) else [_part(each.text) for each in result]
            messages.append(ChatMessage(role="tool", content=parts, tool_call_id=block.tool_use_id))
            continue
        if not messages or messages[-1].role != "user":
            messages.append(ChatMessage(role="user", content=[]))
        messages[-1].content.append(_part(_text(f"{where}[{index}]", block)))  # type: ignore[union-attr, arg-type]
    return messages


def _text(where: str, block: Block) -> str:
    if not isinstance(block, TextBlock):
        kind = shown(type(block).__struct_config__.tag)
        raise bad_request(where, f"{where} of type {kind} has no place in a message of this role")
    return block.text


def _part(text: str) -> ContentPart:
    return ContentPart(type="text", text=text)


def _ends_with_text(messages: list[InputMessage]) -> bool:
    """Return whether the last message is the beginning of the answer."""
    if not messages or messages[-1].role != "assistant":
        return False
    content = messages[-1].content
    return bool(content) and (isinstance(content, str) or isinstance(content[-1], TextBlock))


def _tools(given: list[MessagesTool] | None, ignored: list[str]) -> list[Tool] | None:
    tools: list[Tool] = []
    for index, tool in enumerate(given or ()):
        if tool.type not in (None, "custom"):
            ignored.append(f"tools[{index}] of type {shown(tool.type)} is ignored: the server runs no tools")
            continue
        if tool.input_schema is None:
            raise bad_request(f"tools[{index}].input_schema", f"tools[{index}].input_schema must be given")
        schema = {"type": "object"} | tool.input_schema
        function = FunctionDefinition(
            name=tool.name, description=tool.description, parameters=schema, strict=tool.strict
        )
        tools.append(Tool(type="function", function=function))
    return tools or None


def _tool_choice(choice: MessagesToolChoice) -> Any:
    if choice.type == "tool":
        if choice.name is None:
            raise bad_request("tool_choice.name", "tool_choice.name must be given where tool_choice.type is 'tool'")
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
