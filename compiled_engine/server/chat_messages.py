"""Messages and tools of a chat: request types, checks, and conversion for the template. Unknown keys are ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from compiled_engine.frontend.image_parts import ImageUrl
from compiled_engine.server.errors import bad_request, require, require_at_most
from compiled_engine.server.options import Limits

if TYPE_CHECKING:
    from compiled_engine.server.chat_format import ChatFormat

Name = Annotated[str, Meta(min_length=1, max_length=256)]


class ContentPart(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """A text in a message."""

    text: str


class UrlOfImage(msgspec.Struct, kw_only=True):
    """The URL of an image. `detail` has no effect."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImagePart(msgspec.Struct, kw_only=True, tag_field="type", tag="image_url"):
    """An image in a message, by a URL: a data: URL, or one that the server is allowed to read."""

    image_url: str | UrlOfImage

    @property
    def url(self) -> str:
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url


class InputImagePart(ImagePart, kw_only=True, tag="input_image"):
    """An image in a message, in the form of the Responses API."""

    detail: Literal["auto", "low", "high", "original"] | None = None


Part = ContentPart | ImagePart | InputImagePart


class FunctionCall(msgspec.Struct, kw_only=True):
    """A call of a function. `arguments` is an object or a JSON string; "" and null stand for an empty object."""

    name: Name
    arguments: str | dict[str, Any] = ""


class MessageToolCall(msgspec.Struct, kw_only=True):
    """A tool call in an earlier message of the assistant."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class ChatMessage(msgspec.Struct, kw_only=True):
    """A message of a chat.

    `content` may be absent if there are `tool_calls`. `tool_call_id` is the id of the call that a tool message answers.
    `reasoning_content`, or `reasoning`, is the assistant's reasoning before its answer.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class FunctionDefinition(msgspec.Struct, kw_only=True):
    """The definition of a function.

    `parameters` is the JSON schema of its arguments. It is enforced if `strict` is true and, if the schema is
    supported, whenever tool_choice requires a call.
    """

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


def begins_an_answer(add_generation_prompt: bool | None, continue_final_message: bool | None) -> bool:
    """Return whether the prompt ends with the beginning of a new assistant message, which the template writes.

    Raises ApiError 400 if both fields are true.
    """
    if add_generation_prompt and continue_final_message:
        raise bad_request(
            "add_generation_prompt", "add_generation_prompt must be false where continue_final_message is true"
        )
    return add_generation_prompt is not False and not continue_final_message


def text_of(message: ChatMessage) -> str:
    """Return the text of a message's content: all text parts joined, without images; "" if there is no text."""
    content = message.content or ""
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content if isinstance(part, ContentPart))


def messages_for_template(messages: list[ChatMessage], chat: ChatFormat, limits: Limits) -> list[dict[str, Any]]:
    """Return the messages as dicts, as `render_chat` takes them.

    Raises ApiError 400 if there are no messages or too many, or if a message is invalid.
    """
    if not messages:
        raise bad_request("messages", "messages must not be empty, got []")
    require_at_most("messages", messages, limits.max_messages, "messages")
    parts = sum(len(message.content) for message in messages if isinstance(message.content, list))
    require_at_most("messages", parts, limits.max_messages, "parts")
    return [_message(f"messages[{index}]", message, chat) for index, message in enumerate(messages)]


def _message(where: str, message: ChatMessage, chat: ChatFormat) -> dict[str, Any]:
    role = "system" if message.role == "developer" and not chat.knows("developer") else message.role
    content: Any = message.content
    is_given = content is not None or bool(message.tool_calls)
    require(is_given, f"{where}.content", "a string, or a list of parts", None)
    if isinstance(content, list):
        content = [_part(f"{where}.content[{index}]", part, chat) for index, part in enumerate(content)]
    result: dict[str, Any] = {"role": role, "content": content or ""}
    reasoning = message.reasoning_content or message.reasoning
    further = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": reasoning}
    result |= {key: value for key, value in further.items() if value is not None}
    if message.tool_calls:
        result["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return result


def _part(where: str, part: Part, chat: ChatFormat) -> dict[str, Any]:
    if isinstance(part, ContentPart):
        return {"type": "text", "text": part.text}
    if chat.why_no_images is not None:
        raise bad_request("messages", f"{where} must not be an image: {chat.why_no_images}")
    return {"type": "image", "image": ImageUrl(f"{where}.image_url", part.url)}


def _tool_call(call: MessageToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"type": "function", "function": function} | ({} if call.id is None else {"id": call.id})


def tools_for_template(tools: list[Tool] | None, chat: ChatFormat, limits: Limits) -> list[dict[str, Any]] | None:
    """Return the tools as dicts, as the chat template takes them, or None if there are none.

    Raises ApiError 400 for too many tools, or if the template does not support tools.
    """
    if not tools:
        return None
    require_at_most("tools", tools, limits.max_tools, "tools")
    if not chat.knows("tools"):
        raise bad_request("tools", "tools are not supported: this model's chat template has no place for them")
    functions = []
    for tool in tools:
        function: dict[str, Any] = {"name": tool.function.name}
        if tool.function.description is not None:
            function["description"] = tool.function.description
        function["parameters"] = tool.function.parameters or {"type": "object", "properties": {}}
        functions.append({"type": "function", "function": function})
    return functions
