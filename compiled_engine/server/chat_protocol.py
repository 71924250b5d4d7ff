"""What /v1/chat/completions takes and gives."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from compiled_engine.server.chat_messages import ChatMessage, Tool
from compiled_engine.server.logprob_shapes import ChatLogprobs, PromptLogprobs
from compiled_engine.server.sampling_fields import SamplingFields
from compiled_engine.server.usage import Usage


class ChatRequest(SamplingFields, kw_only=True):
    """max_completion_tokens: max_tokens by its newer name. top_logprobs needs logprobs.

    tool_choice: auto, none, required, or a function. parallel_tool_calls: whether an answer may hold several calls.
    include_reasoning: whether the answer shows its reasoning. continue_final_message: the last message is continued
    instead of answered.
    """

    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=-1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    """arguments: JSON as the model wrote it; in an event, the next part of it."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call; in events only its first part has id, type and name. index: in events alone."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CalledFunction


class AnswerMessage(msgspec.Struct, kw_only=True):
    """content: null if the answer is nothing but calls. Reasoning has two names, as clients know one or the other."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer. finish_reason: stop, length or tool_calls."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatResponse(msgspec.Struct, kw_only=True):
    """The whole answer. Fields that OpenAI's answers do not have are null where nothing was asked for, so that clients
    can read them; events leave them out."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class Delta(msgspec.Struct, kw_only=True):
    """What an event adds to a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    """The next part of an answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """An event."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
