"""Bodies of requests and responses of /v1/completions, /v1/chat/completions and /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.server.chat_messages import ChatMessage, Tool
from compiled_engine.server.errors import bad_request, require_at_most, shown
from compiled_engine.server.logprob_shapes import ChatLogprobs, CompletionLogprobs, PromptLogprobs
from compiled_engine.server.request_fields import HABITS, REFUSED, Refused, refused
from compiled_engine.server.sampling_fields import SamplingFields

# Tokens of a request, counted from its outputs.


class PromptTokensDetails(msgspec.Struct):
    """cached_tokens: tokens from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Draft tokens of the engine: tokens that are part of the completions, and tokens that were wrong or came too
    late."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of all prompts and completions of a request. completion_tokens_details: if it had drafts, with the last
    usage of a stream."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class UsageCounter:
    """Adds up outputs of the kinds "delta" and "final"; each prompt counts once, however many completions it has."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self._completion_tokens = 0
        self._draft_tokens = self._accepted_tokens = 0

    def begin(self, prompt: int, tokens: int) -> None:
        """Start with a prompt of this many tokens and no output."""
        self._prompts[prompt] = (tokens, 0)

    def add(self, prompt: int, output: RequestOutput) -> None:
        self._prompts[prompt] = (len(output.prompt_token_ids), output.num_cached_tokens or 0)
        self._completion_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        if output.finished and output.metrics is not None:
            self._draft_tokens += output.metrics.num_draft_tokens
            self._accepted_tokens += output.metrics.num_accepted_tokens

    def usage(self, unwanted: int = 0) -> Usage:
        """Return the usage so far; `unwanted` tokens were generated without a request for them."""
        prompt = sum(tokens for tokens, _ in self._prompts.values())
        generated = self._completion_tokens - unwanted
        details: CompletionTokensDetails | UnsetType = UNSET
        if self._draft_tokens:
            details = CompletionTokensDetails(self._accepted_tokens, self._draft_tokens - self._accepted_tokens)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=generated,
            total_tokens=prompt + generated,
            prompt_tokens_details=PromptTokensDetails(sum(cached for _, cached in self._prompts.values())),
            completion_tokens_details=details,
        )


# Types of /v1/responses. Nothing is kept between requests: the whole conversation is in `input`.

STATELESS = "the server keeps no responses; give the whole conversation as input"
RESPONSES_REFUSED: dict[str, Refused] = {
    **REFUSED,
    **refused(background=(False,), truncation=("disabled",), context_management=([],)),
    **refused(STATELESS, previous_response_id=(), conversation=()),
    **refused("the server keeps no prompts; give instructions and input", prompt=()),
    **refused("give max_output_tokens", max_tokens=()),
}
RESPONSES_HABITS = HABITS | {"max_tool_calls"}


Budget = Annotated[int, Meta(ge=-1)]


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
    thinking_token_budget: Budget | None = None
    thinking_budget: Budget | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """A message's text."""

    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """The model's reasoning."""

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
    """cached_tokens: tokens from the prefix cache."""

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


# Types of /v1/completions.


class CompletionRequest(SamplingFields, kw_only=True):
    """prompt: text, token ids, or a list of either. echo: the prompt comes before its completion.

    logprobs: how many of the most likely tokens are shown next to the chosen one. return_tokens_as_token_ids: tokens of
    log-probabilities are "token_id:5". add_special_tokens: whether the tokenizer puts its own around a text. max_tokens
    may be 0: with echo, a prompt is scored.
    """

    prompt: Any
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=-1)] | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None


class CompletionChoice(msgspec.Struct, kw_only=True):
    """A completion, or its next part. index: of the prompt times n, plus that of the completion. Fields that OpenAI's
    answers do not have are null in whole answers where nothing was asked for, absent in events."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    """The whole answer, or an event of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


def parse_prompts(prompt: Any, most: int, name: str = "prompt") -> list[str] | list[list[int]]:
    """Return the prompts of a request, at most this many. name: of the field. Raises ApiError 400 naming the invalid
    one.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise _wrong(name, prompt)
    if isinstance(prompt[0], str | list):
        require_at_most(name, prompt, most, f"{name}s")
    if isinstance(prompt[0], str):
        for index, text in enumerate(prompt):
            if not isinstance(text, str):
                raise _wrong(f"{name}[{index}]", text)
        return prompt
    if not isinstance(prompt[0], list):
        return [_token_ids(name, prompt)]
    return [_token_ids(f"{name}[{index}]", ids) for index, ids in enumerate(prompt)]


def _token_ids(name: str, ids: Any) -> list[int]:
    if not isinstance(ids, list) or not ids:
        raise _wrong(name, ids)
    if set(map(type, ids)) != {int}:
        ids = [int(each) if isinstance(each, float) and each.is_integer() else each for each in ids]  # 1.0 is 1 in JSON
    if set(map(type, ids)) != {int}:
        place = next(place for place, token_id in enumerate(ids) if type(token_id) is not int)
        raise _wrong(f"{name}[{place}]", ids[place])
    return ids


def _wrong(name: str, value: Any) -> Exception:
    allowed = "a string, a list of token ids that is not empty, or a list of either"
    return bad_request(name, f"{name}: the prompt must be {allowed}, got {shown(value)}")


class ChatRequest(SamplingFields, kw_only=True):
    """max_completion_tokens: max_tokens by its newer name. top_logprobs needs logprobs. return_tokens_as_token_ids: as
    for completions.

    tool_choice: auto, none, required, or a function. parallel_tool_calls: whether an answer may hold several calls.
    thinking_token_budget, thinking_budget: most tokens of reasoning; -1 for any number. include_reasoning: whether the
    answer shows its reasoning. continue_final_message: the last message is continued
    instead of answered.
    """

    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=-1)] | None = None
    return_tokens_as_token_ids: bool | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: Budget | None = None
    thinking_budget: Budget | None = None
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
    """An answer. finish_reason: stop, length or tool_calls."""

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
    """An event's addition to a message."""

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
