"""Request bodies of /v1/messages and /v1/messages/count_tokens, and their conversion to a chat request."""

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
    ImagePart,
    MessageToolCall,
    Name,
    Part,
    Tool,
)
from compiled_engine.server.errors import bad_request, require, require_absent, require_at_most, require_given, shown
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
# Sampling fields whose results do not fit into a message, with their allowed values.
WITHOUT_PLACE: dict[str, tuple[Any, ...]] = {"n": (1,), "prompt_logprobs": (), "return_token_ids": (False,)}
# Variables of chat templates that turn reasoning on and off.
THINKING = ("enable_thinking", "thinking")
# A billing block that one client puts before its instructions. Its hash differs in each request, so the prefix cache
# would never hit.
NOT_FOR_THE_MODEL = "x-anthropic-billing-header"


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """A text in a message."""

    text: str


class ImageData(msgspec.Struct, kw_only=True, tag_field="type", tag="base64"):
    """The content of an image file in base64."""

    media_type: str
    data: str

    @property
    def as_url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class ImageSource(msgspec.Struct, kw_only=True, tag_field="type", tag="url"):
    """The URL of an image: a data: URL, or one that the server is allowed to read."""

    url: str

    @property
    def as_url(self) -> str:
        return self.url


class ImageBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="image"):
    """An image of the user, or in the result of a tool."""

    source: ImageData | ImageSource


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """Reasoning before an answer. `signature` carries no information; clients send it back."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="redacted_thinking"):
    """Reasoning encrypted by another server; ignored."""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A tool call."""

    id: str
    name: Name
    input: Any


class ToolResultBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_result"):
    """The result of the call with the id `tool_use_id`."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] | None = None


Block = TextBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(msgspec.Struct, kw_only=True):
    """A message. An assistant has blocks of text, thinking and tool_use; a user has text, image and tool_result."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessagesTool(msgspec.Struct, kw_only=True):
    """A client's tool; `type` is "custom" or absent. Other types are tools that run on a server, and are ignored."""

    name: Name
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class MessagesToolChoice(msgspec.Struct, kw_only=True):
    """Whether the answer may or must call tools. With the `type` "tool", it must call the tool `name`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model reasons before its answer.

    `type` has an effect only if the chat template has a variable for it. `budget_tokens` bounds the tokens of
    reasoning.
    """

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None


class SchemaFormat(msgspec.Struct, kw_only=True):
    """Requires an answer in JSON that conforms to the schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """The format of the answer, and the reasoning effort. `effort` needs a template that reads reasoning_effort."""

    effort: str | None = None
    format: SchemaFormat | None = None


class CountTokensRequest(SamplingFields, kw_only=True):
    """The body of a request to /v1/messages/count_tokens.

    `messages` is the conversation. If it ends with an assistant's text, the answer continues that text. `system` has
    instructions. `chat_template_kwargs`, and sampling parameters under the names of the other endpoints, are accepted
    too.
    """

    messages: list[InputMessage]
    system: str | list[TextBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """The body of a request to /v1/messages. `stop_sequences` are strings that end the answer."""

    max_tokens: Annotated[int, Meta(ge=1)]
    stop_sequences: list[Annotated[str, Meta(min_length=1)]] | None = None


def as_chat(fields: CountTokensRequest, chat: ChatFormat, limits: Limits, ignored: list[str]) -> ChatRequest:
    """Convert the request to a chat request. A warning is added to `ignored` for each part without effect.

    Raises ApiError 400 for unsupported values.
    """
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
    """Return the number of blocks of a message, including the blocks within tool results."""
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
    """Return the variables of the chat template, or None if the request has none.

    `thinking` is converted to the variables that the template has for it. If there are none, a warning is added to
    `ignored`.
    """
    if fields.thinking is None:
        return fields.chat_template_kwargs
    names = [name for name in THINKING if name in chat.allowed_settings and chat.knows(name)]
    if not names:
        ignored.append("thinking is ignored: this model's chat template has no variable for it")
    return dict.fromkeys(names, fields.thinking.type != "disabled") | (fields.chat_template_kwargs or {})


def _messages(fields: CountTokensRequest) -> list[ChatMessage]:
    """Convert the messages. All instructions go first, in one message, since few templates accept them elsewhere."""
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


def _instructions(where: str, content: str | Sequence[Block]) -> list[Part]:
    if isinstance(content, str):
        texts = [content]
    else:
        texts = [_text(f"{where}[{index}]", block) for index, block in enumerate(content)]
    return [_part(text) for text in texts if text and not text.startswith(NOT_FOR_THE_MODEL)]


def _of_assistant(where: str, content: str | list[Block]) -> ChatMessage:
    if isinstance(content, str):
        return ChatMessage(role="assistant", content=content)
    message = ChatMessage(role="assistant", content="", tool_calls=[])
    parts: list[Part] = []
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
    """Convert a user message. Each tool result becomes a message of its own; the order of all blocks is kept."""
    if isinstance(content, str):
        return [ChatMessage(role="user", content=content)]
    messages: list[ChatMessage] = []
    for index, block in enumerate(content):
        if isinstance(block, ToolResultBlock):
            result = block.content or ""
            parts = result if isinstance(result, str) else [_of_block(f"{where}[{index}]", each) for each in result]
            messages.append(ChatMessage(role="tool", content=parts, tool_call_id=block.tool_use_id))
            continue
        if not messages or messages[-1].role != "user":
            messages.append(ChatMessage(role="user", content=[]))
        messages[-1].content.append(_of_block(f"{where}[{index}]", block))  # type: ignore[union-attr, arg-type]
    return messages


def _text(where: str, block: Block) -> str:
    if not isinstance(block, TextBlock):
        kind = shown(type(block).__struct_config__.tag)
        raise bad_request(where, f"{where} of type {kind} has no place in a message of this role")
    return block.text


def _part(text: str) -> ContentPart:
    return ContentPart(text=text)


def _of_block(where: str, block: Block) -> Part:
    """Convert a text or image block to a part of a chat message. `where` names the block in errors."""
    return ImagePart(image_url=block.source.as_url) if isinstance(block, ImageBlock) else _part(_text(where, block))


def _ends_with_text(messages: list[InputMessage]) -> bool:
    """Return whether the last message is an assistant's text, which the answer continues."""
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
        require_given(f"tools[{index}].input_schema", tool.input_schema)
        schema = {"type": "object"} | (tool.input_schema or {})
        function = FunctionDefinition(
            name=tool.name, description=tool.description, parameters=schema, strict=tool.strict
        )
        tools.append(Tool(type="function", function=function))
    return tools or None


def _tool_choice(choice: MessagesToolChoice) -> Any:
    if choice.type == "tool":
        require_given("tool_choice.name", choice.name, "where tool_choice.type is 'tool'")
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
