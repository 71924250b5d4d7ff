"""Request and response bodies of /v1/completions, /v1/chat/completions and /v1/responses.

Class docstrings become descriptions in /openapi.json.
"""

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

# Token usage.


class PromptTokensDetails(msgspec.Struct):
    """Details of the prompt tokens. `cached_tokens` came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Draft tokens of the engine.

    Accepted ones are part of the completions; rejected ones were wrong, or lay behind the end of a completion.
    """

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Token counts over all prompts and completions of a request.

    `completion_tokens_details` is present if drafts were used; in a stream, only in the last usage.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class UsageCounter:
    """Sums the token counts of a request's outputs, whose output kind is "delta" or "final".

    The tokens of each prompt count once, whatever its number of completions.
    """

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self._completion_tokens = 0
        self._draft_tokens = self._accepted_tokens = 0

    def begin(self, prompt: int, tokens: int) -> None:
        """Register the prompt with the index `prompt`, which has `tokens` tokens, before its first output."""
        self._prompts[prompt] = (tokens, 0)

    def add(self, prompt: int, output: RequestOutput) -> None:
        self._prompts[prompt] = (len(output.prompt_token_ids), output.num_cached_tokens or 0)
        self._completion_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        if output.finished and output.metrics is not None:
            self._draft_tokens += output.metrics.num_draft_tokens
            self._accepted_tokens += output.metrics.num_accepted_tokens

    def usage(self, unwanted: int = 0) -> Usage:
        """Return the usage so far, less `unwanted` tokens that were generated without being requested."""
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


# /v1/responses. The server is stateless: `input` has the whole conversation.

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
    """The body of a request to /v1/responses.

    `input` is text, or a list of messages, function calls and their outputs. `instructions` is a system message.
    `include` may have "message.output_text.logprobs". Of `text` and `reasoning`, only `text.format` and
    `reasoning.effort` have an effect.
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
    """The text of a message."""

    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """The text of the reasoning."""

    text: str


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """The message of an answer, as an output item."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """The reasoning before an answer, as an output item."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    summary: list[Any] = []
    content: list[ReasoningText]


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A function call. `arguments` is JSON as the model wrote it, or converted from the model's own syntax."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    name: str
    arguments: str


Item = MessageItem | ReasoningItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct):
    """Details of the input tokens. `cached_tokens` came from the prefix cache."""

    cached_tokens: int


class OutputTokensDetails(msgspec.Struct):
    """Details of the output tokens. `reasoning_tokens` counts the tokens up to the end of the reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Token counts of a request."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    """The error of a failed response."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """The reason why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response, complete or as far as it has been generated."""

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


# /v1/completions and /v1/chat/completions.


class CompletionRequest(SamplingFields, kw_only=True):
    """The body of a request to /v1/completions.

    `prompt` is text, token ids, or a list of either. `echo` puts the prompt before its completion. `logprobs` is the
    number of most likely tokens shown beside the chosen one; with `return_tokens_as_token_ids`, tokens are written as
    "token_id:5". With `add_special_tokens`, the tokenizer adds its special tokens around a text. `max_tokens` may be 0;
    with `echo`, that scores the prompt.
    """

    prompt: Any
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=-1)] | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None


class CompletionChoice(msgspec.Struct, kw_only=True):
    """A completion; in an event, its next part.

    `index` is the prompt's index times n, plus the completion's index. Fields unknown to OpenAI's API are null in
    complete answers if not requested, and absent in events. `weight_version` is absent before the first update of the
    weights.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    weight_version: str | UnsetType = UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    """A complete answer, or an event of a streamed answer."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


def parse_prompts(prompt: Any, most: int, name: str = "prompt") -> list[str] | list[list[int]]:
    """Return the prompts in a request field: a list of texts, or a list of lists of token ids.

    `prompt` is the field's value, `name` its name. Raises ApiError 400 for an invalid prompt, and for more than `most`
    prompts.
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
    """The body of a request to /v1/chat/completions.

    `max_completion_tokens` is the newer name of max_tokens. `top_logprobs` requires `logprobs`;
    `return_tokens_as_token_ids` writes tokens as "token_id:5". `tool_choice` is auto, none, required, or a function.
    `parallel_tool_calls` false allows only one call in an answer. `thinking_token_budget` and `thinking_budget` bound
    the tokens of reasoning; -1 for no bound. `include_reasoning` false omits the reasoning. `continue_final_message`
    continues the last message instead of answering it.
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
    """A function call; in an event, `arguments` is the next part.

    `arguments` is JSON as the model wrote it, or converted from the model's own syntax.
    """

    name: str | UnsetType = UNSET
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call. In events, `index` is present, and only a call's first part has id, type and name."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CalledFunction


class AnswerMessage(msgspec.Struct, kw_only=True):
    """The answer. `content` is null if there are only calls.

    `reasoning` and `reasoning_content` have the same text, for different clients.
    """

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """An answer. `finish_reason` is stop, length, tool_calls, or abort if a pause of the engine ended the answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatResponse(msgspec.Struct, kw_only=True):
    """The complete answer. Fields unknown to OpenAI's API are null if not requested; events omit them.

    `weight_version` is absent before the first update of the weights.
    """

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    weight_version: str | UnsetType = UNSET


class Delta(msgspec.Struct, kw_only=True):
    """An event's addition to a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    """The part of an answer that an event adds."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """An event of a streamed answer."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
