"""Convert a JSON object to a typed request; known, unsupported and unknown fields are told apart."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from compiled_engine.sampling.other_params import OTHER_PARAMS
from compiled_engine.schema import nearest
from compiled_engine.server.errors import ApiError, bad_request, shown

MOST_UNKNOWN = 16  # unknown fields that a warning lists

Request = TypeVar("Request", bound=msgspec.Struct)

# Fields that clients commonly send, without effect on a stateless server for one model.
HABITS = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prediction", "request_id"),
        *("prompt_cache_key", "prompt_cache_retention"),
    }
)


@dataclass(frozen=True)
class Refused:
    """An unsupported request field. It is refused, not ignored, since the client expects it to change the answer."""

    instead: str  # the alternative or the reason; empty if the name says it
    asks_nothing: tuple[Any, ...] = ()  # values that have no effect and are accepted


def refused(instead: str = "", **fields: tuple[Any, ...]) -> dict[str, Refused]:
    """Return a Refused for each field. `fields` maps field names to the accepted values, which have no effect."""
    return {name: Refused(instead, asks_nothing) for name, asks_nothing in fields.items()}


STRUCTURED = "give structured_outputs with json, regex, choice, grammar or json_object, or response_format"
OTHER_FORMS = (  # older names, and those of other servers
    *(f"guided_{kind}" for kind in ("json", "regex", "choice", "grammar", "decoding_backend", "whitespace_pattern")),
    *("json_schema", "regex", "choice", "grammar", "ebnf", "structural_tag"),
)
REFUSED: dict[str, Refused] = {
    **refused(
        suffix=("",),
        echo=(False,),
        modalities=(["text"],),
        audio=(),
        web_search_options=(),
        verbosity=("medium",),
        moderation=(),
        documents=([],),
        media_io_kwargs=({},),
        mm_processor_kwargs=({},),
    ),
    **refused("give n", best_of=(1,)),
    **refused("it is deprecated; give tools", functions=([],)),
    **refused("it is deprecated; give tool_choice", function_call=("none",)),
    **refused("templates come only from the server", chat_template=()),
    **refused("give text or token ids", prompt_embeds=()),
    **refused("it is an object of Python; only LLM takes one", token_mask=()),
    **refused("truncate_prompt_tokens keeps the last tokens", truncation_side=("left",)),
    **refused("token ids come with return_token_ids", return_tokens_as_token_ids=(False,)),
    **refused("give extra_args", vllm_xargs=({},)),
    **refused(STRUCTURED, **dict.fromkeys(OTHER_FORMS, ()), guided_json_object=(False,)),
}


def read_request(
    body: Mapping[str, Any],
    kind: type[Request],
    *,
    strict: bool = False,
    refused: Mapping[str, Refused] = REFUSED,
    habits: frozenset[str] = HABITS,
) -> tuple[Request, list[str]]:
    """Return the body as a `kind`, and a warning for each ignored field. A null counts as absent.

    `refused` are the unsupported fields. Fields in `habits` are ignored without a warning. Raises ApiError 400 with the
    field for a value of the wrong type, an unsupported field and, with `strict`, an unknown field.
    """
    known = dict.fromkeys(kind.__struct_encode_fields__)
    values: dict[str, Any] = {}
    ignored: list[str] = []
    num_unknown = 0
    for name, value in body.items():
        if value is None or name in habits:
            continue
        if name in known:
            values[name] = value
        elif name in refused:
            refuse(name, value, refused[name])
        elif name in OTHER_PARAMS:
            ignored += _settle(name, value)
        elif (num_unknown := num_unknown + 1) <= MOST_UNKNOWN:
            text = f"unknown field {shown(name)} is ignored"
            if near := nearest(name, known):
                text += f"; did you mean {near}?"
            if strict:
                raise bad_request(name[:100], text.replace(" is ignored", ""))
            ignored.append(text)
    if num_unknown > MOST_UNKNOWN:
        ignored.append(f"{num_unknown - MOST_UNKNOWN} more unknown fields are ignored")
    return convert(values, kind), ignored


def convert(values: Any, kind: type[Request], within: str = "") -> Request:
    """Convert `values`, decoded JSON, to a `kind`. Floats such as 1.0 are accepted as integers.

    Raises ApiError 400 with the name of an invalid field, after the prefix `within`, and with what is allowed.
    """
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise _wrong(error, values, kind, within) from error
    values = _with_integers(values)
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise _wrong(error, values, kind, within) from error


def _wrong(error: msgspec.ValidationError, values: Any, kind: type[Any], within: str) -> ApiError:
    """Return an ApiError 400 for msgspec's error, with the field, its value and what is allowed.

    `values` and `kind` are what was to be converted. `within` is the prefix of field names.
    """
    text, _, path = str(error).partition(" - at `")
    path = path.removesuffix("`").removeprefix("key in ").removeprefix("$").removeprefix(".")
    if missing := re.search(r"missing required field `(\w+)`", text):
        path = f"{path}.{missing[1]}".removeprefix(".")
        return bad_request(within + path, f"{within}{path} must be given")
    text = text[:1].lower() + text[1:].replace("`", "")
    where = within + path
    value = _at(values, path)
    got = "" if value is ... else f", got {shown(value)}"
    text = text.split(", got")[0]
    if text.startswith(("invalid enum value", "invalid value")) and (allowed := _texts_at(kind, path)):
        text = f"expected {' or '.join(map(repr, allowed))}"
    return bad_request(where or None, f"{where}: {text}{got}")


def _texts_at(kind: type[Any], path: str) -> list[str]:
    """Return the strings that a struct allows at a path such as messages[0].role."""
    found: list[inspect.Type] = [inspect.type_info(kind)]
    for name in re.findall(r"[^.\[\]]+", path):
        found = [deeper for each in found for deeper in _within(each, name)]
    return sorted({str(value) for each in found if isinstance(each, inspect.LiteralType) for value in each.values})


def _within(kind: inspect.Type, name: str) -> list[inspect.Type]:
    """Return the types of a struct's field `name`, or of a list's items. A union becomes its members.

    Returns an empty list for any other type.
    """
    if isinstance(kind, inspect.StructType) and name == kind.tag_field:
        inner: list[inspect.Type] = [inspect.LiteralType((str(kind.tag),))]
    elif isinstance(kind, inspect.StructType):
        inner = [field.type for field in kind.fields if field.encode_name == name]
    elif isinstance(kind, inspect.ListType):
        inner = [kind.item_type]
    else:
        return []
    return [each for found in inner for each in (found.types if isinstance(found, inspect.UnionType) else (found,))]


def _with_integers(values: Any) -> Any:
    """Return the values with floats such as 1.0 replaced by integers, unless they are too large to be exact."""
    if isinstance(values, dict):
        return {key: _with_integers(value) for key, value in values.items()}
    if isinstance(values, list):
        return [_with_integers(value) for value in values]
    return int(values) if isinstance(values, float) and values.is_integer() and abs(values) < 2**53 else values


def refuse(name: str, value: Any, field: Refused) -> None:
    """Raise ApiError 400 unless the value has no effect: only the values in `field.asks_nothing` are accepted."""
    if not any(type(value) is type(each) and value == each for each in field.asks_nothing):
        instead = f": {field.instead}" if field.instead else ""
        allowed = f"; allowed: {', '.join(map(repr, field.asks_nothing))}" if field.asks_nothing else ""
        raise bad_request(name, f"{name} is not supported{instead}{allowed}", code="unsupported_parameter")


def _settle(name: str, value: Any) -> list[str]:
    """Check a sampling parameter that only other engines have.

    Returns warnings if the parameter is ignored. Raises ApiError 400 if its value is not supported.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            OTHER_PARAMS[name].settle(name, value)
        except ValueError as error:
            raise bad_request(name, str(error), code="unsupported_parameter") from error
    return [str(warning.message) for warning in caught]


def _at(values: Any, path: str) -> Any:
    """Return the value at a path such as messages[0].role; Ellipsis if the path matches several values or none."""
    for key, index in re.findall(r"([^.\[\]]+)|\[(\d+|\.\.\.)\]", path):
        try:
            values = values[key] if key else values[int(index)]
        except (KeyError, IndexError, TypeError, ValueError):
            return ...
    return values
