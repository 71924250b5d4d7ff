"""What /v1/completions takes and gives."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from compiled_engine.server.errors import bad_request, shown
from compiled_engine.server.logprob_shapes import CompletionLogprobs, PromptLogprobs
from compiled_engine.server.request_fields import require_at_most
from compiled_engine.server.sampling_fields import SamplingFields
from compiled_engine.server.usage import Usage


class CompletionRequest(SamplingFields, kw_only=True):
    """prompt: text, token ids, or a list of either. echo: the prompt comes before its completion.

    logprobs: how many of the most likely tokens are shown beside the chosen one. add_special_tokens: whether the
    tokenizer puts its own around a text. max_tokens may be 0: with echo, a prompt is scored.
    """

    prompt: Any
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=-1)] | None = None
    add_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One completion, or the next part of one. index: of the prompt times n, plus that of the completion.
    Fields that OpenAI's answers do not have are null in whole answers where nothing was asked for, absent in events."""

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


def parse_prompts(prompt: Any, most: int) -> list[str] | list[list[int]]:
    """The prompts of a request, of which there may be so many. Raises ApiError 400 naming the one that is wrong."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise _wrong("prompt", prompt)
    if isinstance(prompt[0], str | list):
        require_at_most("prompt", prompt, most, "prompts")
    if isinstance(prompt[0], str):
        for index, text in enumerate(prompt):
            if not isinstance(text, str):
                raise _wrong(f"prompt[{index}]", text)
        return prompt
    if not isinstance(prompt[0], list):
        return [_token_ids("prompt", prompt)]
    return [_token_ids(f"prompt[{index}]", ids) for index, ids in enumerate(prompt)]


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
    allowed = "text, a list of token ids that is not empty, or a list of either"
    return bad_request(name, f"{name}: the prompt must be {allowed}, got {shown(value)}")
