"""What /v1/responses takes and gives. Nothing is kept between requests: the whole conversation is in `input`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from compiled_engine.server.request_fields import HABITS, REFUSED, Refused
from compiled_engine.server.sampling_fields import SamplingFields

STATELESS = "the server keeps no responses; give the whole conversation as input"
RESPONSES_REFUSED: dict[str, Refused] = {
    **REFUSED,
    "previous_response_id": Refused(STATELESS),
    "conversation": Refused(STATELESS),
    "prompt": Refused("the server keeps no prompts; give instructions and input"),
    "background": Refused("there is nothing to fetch the response from later", (False,)),
    "truncation": Refused("the input is taken whole or not at all", ("disabled",)),
    "context_management": Refused("the input is taken whole or not at all", ([],)),
    "max_tokens": Refused("give max_output_tokens"),
}
RESPONSES_HABITS = HABITS | {"max_tool_calls"}


class ResponsesRequest(SamplingFields, kw_only=True):
    """input: text, or a list of messages, function calls and their outputs. instructions: a system message.

    include: "message.output_text.logprobs" for log-probabilities. text, reasoning: only text.format and
    reasoning.effort count.
    """

    input: Any
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=-1)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """A message's text."""

    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """What the model wrote for itself."""

    text: str


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """An answer."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning before an answer."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    summary: list[Any] = []
    content: list[ReasoningText]


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call. arguments: JSON as the model wrote it."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    name: str
    arguments: str


Item = MessageItem | ReasoningItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct):
    """cached_tokens: those that came from the prefix cache."""

    cached_tokens: int


class OutputTokensDetails(msgspec.Struct):
    """reasoning_tokens: those up to the end of the reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Tokens of the request."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response, whole or as far as it is."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, Any]
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    metadata: dict[str, str] = {}
    usage: ResponseUsage | None = None
