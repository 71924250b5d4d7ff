"""Translates keywords of this engine and of other engines to this engine's options."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from compiled_engine.options import EngineOptions
from compiled_engine.other_engines.keywords import (
    ABOUT_COMPILATION,
    KEYWORDS,
    Honoured,
    Nested,
    Only,
    Row,
    Rows,
    WithoutEffect,
)
from compiled_engine.other_engines.lengths import read_length
from compiled_engine.process.callers import warn_caller
from compiled_engine.schema import read_mapping, unknown_name_message

SIZES = ("capture_sizes", "capture_token_sizes")
# Keywords that override values of config.json.
OVERRIDES = ("hf_overrides", "json_model_override_args", "rope_scaling", "rope_theta")
CUDA_GRAPH_OPTIONS = ("graph_mode", *SIZES)
DEFAULTS = {field.name: field.default for field in fields(EngineOptions)}


class Wanted(NamedTuple):
    """An option of this engine, its value, and the keyword that requests it."""

    keyword: str
    option: str
    value: Any

    def __str__(self) -> str:
        if self.keyword == self.option:
            return f"{self.option} is {self.value!r}"
        return f"{self.keyword} makes {self.option} {self.value!r}"


class Ignored(NamedTuple):
    """A keyword without effect, and the reason why it has none."""

    keyword: str
    reason: str


class Translated(NamedTuple):
    """Result of `translate`: the requested options, and the keywords without effect."""

    options: dict[str, Any]
    ignored: tuple[Ignored, ...]

    @property
    def note(self) -> str:
        """The keywords without effect as text, grouped by reason."""
        reasons: dict[str, list[str]] = {}
        for word, reason in self.ignored:
            reasons.setdefault(reason, []).append(word)
        return "; ".join(f"{', '.join(words)} ({reason})" for reason, words in reasons.items())


def make_options(keywords: Mapping[str, Any]) -> EngineOptions:
    """Return the options for keywords of `LLM`, which may be other engines' keywords; see `translate`.

    Issues a single warning that names every keyword without effect.
    """
    found = translate(keywords, on_gpu=lambda: is_on_gpu(keywords.get("device", "auto")))
    if found.ignored:
        warn_caller(f"keywords without effect: {found.note}")
    return EngineOptions(**found.options)


def is_on_gpu(device: Any) -> bool:
    """Return whether the engine runs on a GPU with this value of the option `device`. Imports PyTorch."""
    import torch

    return (str(device) == "auto" or str(device).startswith("cuda")) and torch.cuda.is_available()


def translate(
    keywords: Mapping[str, Any],
    *,
    on_gpu: Callable[[], bool],
    rows: Rows = KEYWORDS,
    defaults: Mapping[str, Any] = DEFAULTS,
) -> Translated:
    """Translate keywords to options. Another engine's keyword has no effect if its value is None.

    on_gpu: returns whether CUDA graphs are possible; called only if that matters. Without CUDA graphs, other engines'
    keywords about them have no effect. Capture sizes from other engines also have no effect for batches that the graph
    mode does not capture. rows: other engines' keywords. defaults: this engine's options and their defaults.

    Raises TypeError for an unknown keyword, and ValueError for a value that needs an unsupported feature or contradicts
    another keyword.
    """
    wanted: dict[str, Wanted] = {}
    ignored: dict[Ignored, None] = {}
    sizes: list[Wanted] = []
    for item in _read_all(keywords, rows, defaults):
        if isinstance(item, Ignored):
            ignored[item] = None
        elif item.option in CUDA_GRAPH_OPTIONS and item.keyword not in defaults and not on_gpu():
            ignored[Ignored(item.keyword, "CUDA graphs need a CUDA GPU")] = None
        elif item.option in SIZES and item.keyword not in defaults:
            sizes.append(item)  # applied last: their effect depends on all keywords
        else:
            _add(wanted, item, defaults)
    captured = _captured(wanted) if sizes else ()
    for item in sizes:
        if item.option in captured:
            _add(wanted, item, defaults)
        elif not captured:
            ignored[Ignored(item.keyword, "the mode captures no CUDA graphs")] = None
    return Translated({option: item.value for option, item in wanted.items()}, tuple(ignored))


def _captured(wanted: Mapping[str, Wanted]) -> Sequence[str]:
    """Return which of capture_sizes and capture_token_sizes (SIZES) have an effect with the wanted modes.

    capture_sizes is for batches of decodes, capture_token_sizes for other batches. The options `mode` and `graph_mode`
    in `wanted` decide which of these batches are captured as CUDA graphs.
    """
    mode, graph_mode = (wanted[name].value if name in wanted else "auto" for name in ("mode", "graph_mode"))
    if graph_mode == "auto":
        return [] if mode in ("eager", "compiled") else list(SIZES)
    from compiled_engine.config import GraphMode  # imports PyTorch

    for known in GraphMode:
        if known.value == graph_mode:
            families = zip(SIZES, (known.captures_decodes, known.captures_mixed), strict=True)
            return [name for name, captures in families if captures]
    return list(SIZES)  # an invalid mode, reported elsewhere


def _add(wanted: dict[str, Wanted], item: Wanted, defaults: Mapping[str, Any]) -> None:
    """Add `item` to `wanted`. Raises ValueError if another keyword requests another value of the same option.

    A value that is the option's default (see `defaults`) contradicts nothing.
    """
    default, other = defaults[item.option], wanted.get(item.option)
    if other is None or other.value == default:
        wanted[item.option] = item
    elif item.value not in (default, other.value):
        raise ValueError(f"{item}, but {other}; allowed: one of the two")


def _read_all(keywords: Mapping[str, Any], rows: Rows, defaults: Mapping[str, Any]) -> Iterator[Wanted | Ignored]:
    for name, value in keywords.items():
        if name in ABOUT_COMPILATION and value is not None and keywords.get("enforce_eager") is True:
            yield Ignored(name, "enforce_eager is True, so nothing is compiled")
        elif name in rows:
            yield from _read(name, value, rows[name], keywords)
        elif name in defaults:
            yield Wanted(name, name, _fixed(value))
        else:
            raise TypeError(unknown_name_message("LLM has no option", name, {*defaults, *rows, "progress"}))


def _read(name: str, value: Any, row: Row, given: Mapping[str, Any]) -> Iterator[Wanted | Ignored]:
    """Yield the options that the keyword `name` requests with this value, or Ignored if it has no effect.

    given: all keywords, for rows that depend on several keywords. Raises TypeError or ValueError for an invalid value.
    """
    if value is None:
        return
    match row:
        case WithoutEffect(reason, anyway):
            if value not in anyway if anyway else not _asks_for_nothing(value):
                yield Ignored(name, reason)
        case Only():
            refuse(name, value, row)
        case Honoured():
            try:
                found = _honour(value, row, given)
            except ValueError as error:
                raise ValueError(f"{name} {error}") from error
            if isinstance(found, str):
                yield Ignored(f"{name}={_name(value)}", found)
            else:
                for option, wanted in found.items():
                    yield Wanted(name, option, _fixed(wanted))
        case Nested(rows, scalar):
            if isinstance(value, str) and value.startswith("{"):
                value = read_mapping(name, value)
            elif scalar is not None and isinstance(value, int | str):
                value = {scalar: value}
            if not isinstance(value, Mapping):
                raise TypeError(f"{name} is {value!r}; allowed: a dict{f', or its {scalar!r}' if scalar else ''}")
            for key, item in value.items():
                if key not in rows:
                    raise TypeError(unknown_name_message(f"{name} has no key", str(key), rows))
                yield from _read(f"{name}[{key!r}]", item, rows[key], given)


def refuse(name: str, value: Any, row: Only) -> None:
    """Raise ValueError if the value of the keyword `name` would use the unsupported feature that `row` describes."""
    if not _is_one_of(value, row.values):
        allowed = ", ".join(map(repr, (*row.values, None)))
        raise ValueError(f"{name} is {value!r}, which is not supported; {row.instead} (allowed: {allowed})")


def _honour(value: Any, row: Honoured, given: Mapping[str, Any]) -> Mapping[str, Any] | str:
    """Return the options that a keyword's value stands for, or the reason why the value has no effect.

    given: all keywords. Raises ValueError, whose message has the value and what is allowed.
    """
    known = row.values.get(_name(value).lower(), value)
    if isinstance(known, WithoutEffect):
        return known.reason
    if row.choices is not None:
        return _choose(value, row.choices)
    if row.option is not None:
        return {} if value in row.nothing else {row.option: known}
    read = READERS[row.read] if isinstance(row.read, str) else row.read
    return read(value, given)


def _choose(value: Any, choices: Mapping[Any, Mapping[str, Any]]) -> Mapping[str, Any]:
    for known, options in choices.items():
        if _is_one_of(value, (known,)) or (isinstance(known, str) and _name(value).lower() == known.lower()):
            return options
    raise ValueError(f"is {value!r}; allowed: {', '.join(map(repr, choices))}")


def _capture_sizes(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options capture_sizes and capture_token_sizes, both with the sizes in `value`.

    Sizes above max_num_seqs are left out of the first option, sizes above max_num_batched_tokens of the second, if
    `given` (all keywords) has these limits.
    """
    if not isinstance(value, list | tuple) or not all(isinstance(size, int) for size in value):
        raise ValueError(f"is {value!r}; allowed: a list of integers")
    return {
        "capture_sizes": _at_most(given.get("max_num_seqs"), value),
        "capture_token_sizes": _at_most(given.get("max_num_batched_tokens"), value),
    }


def _length(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    return {} if value in ("auto", -1) else {"max_model_len": read_length(value)}


def _at_most(limit: Any, sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in sizes if not isinstance(limit, int) or size <= limit)


def _cuda_graph_sizes(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options capture_sizes and capture_token_sizes for vLLM's cuda_graph_sizes, a list.

    As in vLLM, several values are the sizes themselves. A single value stands for the sizes 1, 2, 4 and the multiples
    of 8 up to it. An empty list means the default. given: all keywords.
    """
    match value:
        case []:
            return {}
        case [int(largest)]:
            value = [1, 2, 4, *range(8, largest + 1, 8)]
    return _capture_sizes(value, given)


def _device_ids(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(value, list | tuple) or len(value) != 1 or not str(value[0]).isdecimal():
        raise ValueError(f"is {value!r}; allowed: a list of one number, as the engine runs on one device")
    return {"device": f"cuda:{value[0]}"}


def _hf_token(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(value, bool):
        raise ValueError("holds a token; allowed: True or False, with the token in the environment variable HF_TOKEN")
    return {}


def _overrides(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the option hf_overrides, merged from all keywords that override config.json (OVERRIDES).

    value: the value of the keyword that is being read. given: all keywords. Raises ValueError if `value` is invalid.
    """
    found: dict[str, Any] = {}
    for name in OVERRIDES:
        each = given.get(name)
        if isinstance(each, str):
            try:
                each = json.loads(each)
            except ValueError as error:
                if given[name] is value:
                    raise ValueError(f"is {value!r}, which is no JSON: {error}") from error
        if name in ("rope_scaling", "rope_theta"):
            each = None if each is None else {name: each}
        elif not isinstance(each, Mapping | None) and given[name] is value:
            raise ValueError(f"is {value!r}; allowed: a dict of values of config.json, or one as JSON")
        if isinstance(each, Mapping):
            found |= each
    return {"hf_overrides": found} if found else {}


# Reader functions by the names that rows use. Each converts a value, given all keywords, to options.
READERS: Mapping[str, Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]] = {
    "": lambda value, given: {},
    "capture sizes": _capture_sizes,
    "sizes or the largest": _cuda_graph_sizes,
    "one device": _device_ids,
    "no token": _hf_token,
    "length": _length,
    "overrides": _overrides,
}


def _fixed(value: Any) -> Any:
    """Return a list as a tuple, since options hold tuples. Return other values unchanged."""
    return tuple(value) if isinstance(value, list) else value


def _name(value: Any) -> str:
    """Return the name of an enum member or of a dtype; otherwise the value as text."""
    return str(getattr(value, "name", value)).removeprefix("torch.")


def _is_one_of(given: Any, values: tuple[Any, ...]) -> bool:
    """Return whether `given` equals one of the values. True does not equal 1 here."""
    return any(isinstance(given, bool) == isinstance(value, bool) and bool(given == value) for value in values)


def _asks_for_nothing(value: Any) -> bool:
    return value is False or (isinstance(value, str | list | tuple | set | dict) and not value)
