"""The fields of SamplingParams in requests: all of them, under their own names, but for objects of Python."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from compiled_engine.frontend.prompts import LONGEST_SALT
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.value_checks import LARGEST_SCALE, SMALLEST_SCALE
from compiled_engine.server.errors import bad_request, blamed_on_request
from compiled_engine.server.options import Limits
from compiled_engine.server.request_fields import require_at_most

Positive = Annotated[int, Meta(ge=1)]
TokenId = Annotated[int, Meta(ge=0)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
# Entries of allowed_token_ids, which every completion has; and bytes of extra_args, likewise.
MOST_ALLOWED, MOST_EXTRA_BYTES = 1 << 18, 4096
Text = Annotated[str, Meta(min_length=1)]


class StreamOptions(msgspec.Struct):
    """include_usage: a last chunk with the usage. continuous_usage_stats: with include_usage, the usage so far in every
    chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    @property
    def shows_usage_so_far(self) -> bool:
        return bool(self.include_usage and self.continuous_usage_stats)


class SamplingFields(msgspec.Struct, kw_only=True):
    """What completions and chats have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Positive | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=SMALLEST_SCALE, le=LARGEST_SCALE)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=LARGEST_SCALE)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: int | None = None
    stop: str | list[Text] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    max_tokens: TokenId | None = None
    min_tokens: TokenId | None = None
    prompt_logprobs: Annotated[int, Meta(ge=-1)] | None = None
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-LARGEST_SCALE, le=LARGEST_SCALE)]] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    bad_words: list[Text] | None = None
    bad_words_token_ids: list[Annotated[list[TokenId], Meta(min_length=1)]] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    extra_args: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: int | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=LONGEST_SALT)] | None = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)


# Fields that stand for themselves; the others are `logprobs`, which completions and chats have in forms of their own,
# and token_mask, an object.
OTHERS = {"model", "stream", "stream_options", "logit_bias", "priority", "return_token_ids", "cache_salt"}
SAME = tuple(name for name in SamplingFields.__struct_fields__ if name not in OTHERS)


def sampling_params(
    fields: SamplingFields, defaults: SamplingParams, limits: Limits, longest: int, **more: Any
) -> SamplingParams:
    """The defaults with what the request gives. longest: most tokens of an answer. `more`: further fields. Raises
    ApiError 400 naming the field."""
    check_bounds(fields, limits, longest, more.get("logprobs"))
    values = {name: value for name in SAME if (value := getattr(fields, name)) is not None} | more
    if fields.logit_bias is not None:
        values["logit_bias"] = _by_token_id(fields.logit_bias)
    default = defaults.max_tokens if limits.max_answer_tokens == -1 else min(defaults.max_tokens or longest, longest)
    if default is not None and "max_tokens" not in values:
        values["max_tokens"] = max(default, fields.min_tokens or 0)
    if fields.stop == "":
        values["stop"] = None
    try:
        return replace(defaults, **values)
    except (TypeError, ValueError) as error:
        raise blamed_on_request(error) from error


def check_bounds(fields: SamplingFields, limits: Limits, longest: int, logprobs: int | None) -> None:
    """Raise ApiError 400 where a request asks for more than the server allows."""
    most = limits.max_token_list
    if isinstance(fields.stop, list):
        require_at_most("stop", fields.stop, limits.max_stop, "strings")
    for stop in [fields.stop] if isinstance(fields.stop, str) else fields.stop or ():
        require_at_most("stop", stop, limits.max_stop_length, "characters in a string")
    for name, list_of_tokens in (("stop_token_ids", fields.stop_token_ids), ("logit_bias", fields.logit_bias)):
        require_at_most(name, list_of_tokens, most, "tokens")
    require_at_most("bad_words", fields.bad_words, most, "words")
    require_at_most("bad_words_token_ids", fields.bad_words_token_ids, most, "words")
    for word in fields.bad_words or ():
        require_at_most("bad_words", word, limits.max_stop_length, "characters in a word")
    for tokens in fields.bad_words_token_ids or ():
        require_at_most("bad_words_token_ids", tokens, limits.max_stop_length, "tokens in a word")
    if fields.allowed_token_ids is not None:
        fields.allowed_token_ids = list(dict.fromkeys(fields.allowed_token_ids))
        if (count := len(fields.allowed_token_ids) * (fields.n or 1)) > MOST_ALLOWED:
            what = "the number of different allowed_token_ids times n"
            raise bad_request("allowed_token_ids", f"{what} must be at most {MOST_ALLOWED}, got {count}")
    if fields.extra_args is not None and (size := len(json.dumps(fields.extra_args))) > MOST_EXTRA_BYTES:
        raise bad_request("extra_args", f"extra_args must have at most {MOST_EXTRA_BYTES} bytes as JSON, got {size}")
    top_logprobs = getattr(fields, "top_logprobs", None)
    asked = (("top_logprobs", top_logprobs), ("logprobs", logprobs), ("prompt_logprobs", fields.prompt_logprobs))
    for name, value in asked:
        if value is not None and limits.max_logprobs != -1 and (value > limits.max_logprobs or value == -1):
            raise bad_request(name, f"{name} must be at most {limits.max_logprobs}, got {value}")
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"):
        value = getattr(fields, name, None)
        if value is not None and value > longest:
            raise bad_request(name, f"{name} must be at most {longest}, got {value}")
    if fields.streams and fields.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs", "prompt_logprobs must be absent where stream is true")


def _by_token_id(biases: dict[str, float]) -> dict[int, float]:
    """JSON has text for keys."""
    for key in biases:
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and key == str(int(key))):
            raise bad_request("logit_bias", f"logit_bias must have token ids as its keys, got {key[:100]!r}")
    return {int(key): bias for key, bias in biases.items()}
