"""Request fields for SamplingParams: all parameters under their own names, except Python objects."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sized
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

import msgspec
from msgspec import Meta

from compiled_engine.frontend.prompts import LONGEST_SALT
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.value_checks import LARGEST_SCALE
from compiled_engine.schema import JsonSchema, declarations
from compiled_engine.server.errors import bad_request, blamed_on_request, require, require_absent, require_at_most
from compiled_engine.server.options import Limits

TokenId = Annotated[int, Meta(ge=0)]
# Upper bounds: entries of allowed_token_ids times n, and bytes of extra_args.
MOST_ALLOWED, MOST_EXTRA_BYTES = 1 << 18, 4096


class StreamOptions(msgspec.Struct):
    """`include_usage` adds a final chunk with the usage. `continuous_usage_stats` then adds it to every chunk too."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    @property
    def shows_usage_so_far(self) -> bool:
        return bool(self.include_usage and self.continuous_usage_stats)


class RequestFields(msgspec.Struct, kw_only=True):
    """Fields of completions and chats that are no sampling parameters, or that have another type in SamplingParams."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenId | None = None  # 0 scores the prompt
    logit_bias: dict[str, Annotated[float, Meta(ge=-LARGEST_SCALE, le=LARGEST_SCALE)]] | None = None
    priority: int | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=LONGEST_SALT)] | None = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)


# JSON schema bound -> msgspec's name. Maxima of integers are checked against the server's limits instead.
BOUNDS = {
    "minimum": "ge",
    "exclusiveMinimum": "gt",
    "maximum": "le",
    "minLength": "min_length",
    "minItems": "min_length",
}
TYPES: dict[str, Any] = {"integer": int, "number": float, "boolean": bool, "string": str, "object": dict[str, Any]}


def request_type(schema: JsonSchema) -> Any:
    """Return the Python type, with msgspec's bounds, of a request field with this JSON schema."""
    if "enum" in schema:
        return Literal[tuple(schema["enum"])]  # type: ignore[misc]
    if "anyOf" in schema:
        return Union[tuple(map(request_type, schema["anyOf"]))]  # noqa: UP007
    kind = list[request_type(schema["items"])] if schema["type"] == "array" else TYPES[schema["type"]]  # type: ignore[misc]
    bounds = {BOUNDS[name]: bound for name, bound in schema.items() if name in BOUNDS}
    if kind is int:
        bounds.pop("le", None)
    return Annotated[kind, Meta(**bounds)] if bounds else kind


# `logprobs` differs between completions and chats; token_mask is a Python object.
DECLARED = {
    each.name: request_type(each.kind.schema)
    for each in declarations(SamplingParams)
    if each.kind.schema and each.name not in {*RequestFields.__struct_fields__, "logprobs"}
}
# Fields named like their parameters.
SAME = (*DECLARED, "max_tokens")

if TYPE_CHECKING:

    class SamplingFields(RequestFields):
        """Fields shared by completions, chats, responses and messages."""

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

else:
    SamplingFields = msgspec.defstruct(
        "SamplingFields",
        [(name, kind | None, None) for name, kind in DECLARED.items()],
        bases=(RequestFields,),
        kw_only=True,
        module=__name__,
    )


def sampling_params(
    fields: SamplingFields, defaults: SamplingParams, limits: Limits, longest: int, **more: Any
) -> SamplingParams:
    """Return the sampling parameters of a request: `defaults`, updated with the request's fields.

    `longest` is the largest number of tokens that an answer may have. The parameters in `more` replace the request's.
    Raises ApiError 400 with the name of an invalid field.
    """
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
    """Raise ApiError 400 if a request exceeds the server's limits. Repeated allowed_token_ids are removed in place.

    `longest` is the largest number of tokens that an answer may have. `logprobs` is the sampling parameter of that
    name. Streams with prompt_logprobs are refused too.
    """
    for bound in _counts(fields, limits):
        require_at_most(*bound)
    if fields.allowed_token_ids is not None:
        fields.allowed_token_ids = list(dict.fromkeys(fields.allowed_token_ids))
        count = len(fields.allowed_token_ids) * (fields.n or 1)
        what = "the number of different allowed_token_ids times n"
        require(count <= MOST_ALLOWED, what, f"at most {MOST_ALLOWED}", count, param="allowed_token_ids")
    require_at_most("extra_args", len(json.dumps(fields.extra_args)), MOST_EXTRA_BYTES, "bytes as JSON")
    top_logprobs = getattr(fields, "top_logprobs", None)
    asked = (("top_logprobs", top_logprobs), ("logprobs", logprobs), ("prompt_logprobs", fields.prompt_logprobs))
    for name, value in asked:
        if value is not None and limits.max_logprobs != -1 and (value > limits.max_logprobs or value == -1):
            every = ": -1 is the whole vocabulary, which needs --max-logprobs -1" if value == -1 else ""
            raise bad_request(name, f"{name} must be from 0 to {limits.max_logprobs}, got {value}{every}")
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"):
        value = getattr(fields, name, None)
        require(value is None or value <= longest, name, f"at most {longest}", value)
    if fields.streams:
        require_absent("prompt_logprobs", fields.prompt_logprobs, "where stream is true")


def _counts(fields: SamplingFields, limits: Limits) -> Iterator[tuple[str, Sized | None, int, str]]:
    """Yield (name, items, largest allowed number of items, unit of the items) for each bound on a field.

    The items of a stop string or bad word are its characters; the items of a bad word of token ids are the ids.
    """
    most, longest = limits.max_token_list, limits.max_stop_length
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop
    yield "stop", stops, limits.max_stop, "strings"
    yield "stop_token_ids", fields.stop_token_ids, most, "tokens"
    yield "logit_bias", fields.logit_bias, most, "tokens"
    yield "bad_words", fields.bad_words, most, "words"
    yield "bad_words_token_ids", fields.bad_words_token_ids, most, "words"
    yield from (("stop", stop, longest, "characters in a string") for stop in stops or ())
    yield from (("bad_words", word, longest, "characters in a word") for word in fields.bad_words or ())
    yield from (("bad_words_token_ids", ids, longest, "tokens in a word") for ids in fields.bad_words_token_ids or ())


def _by_token_id(biases: dict[str, float]) -> dict[int, float]:
    """Return the biases by token id; the keys are strings in JSON. Raises ApiError 400 for other keys."""
    for key in biases:
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and key == str(int(key))):
            raise bad_request("logit_bias", f"logit_bias must have token ids as its keys, got {key[:100]!r}")
    return {int(key): bias for key, bias in biases.items()}
