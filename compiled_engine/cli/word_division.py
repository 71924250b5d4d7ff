"""Divide a command line into a command's own options and other engines' options.

Other engines' spellings of the command's own options are converted: underscores, short names, dotted keys of JSON
objects, several values in a row, and numbers with units.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from compiled_engine.options import EngineOptions
from compiled_engine.other_engines.keywords import SHORT, Rows
from compiled_engine.other_engines.lengths import read_length
from compiled_engine.schema import declarations

# Own options whose values are JSON objects: mappings in a YAML file, or dotted keys on the command line.
OBJECTS = (
    *("speculative_config", "pooler_config", "hf_overrides", "default_chat_template_kwargs"),
    *("limit_mm_per_prompt", "mm_processor_kwargs", "kv_events_config"),
)
INTEGERS = {each.name for each in declarations(EngineOptions) if each.schema.get("type") == "integer"}
_LEVEL = re.compile(r"-O(\d)")


@dataclass
class Words:
    """The divided command line."""

    own: list[str] = field(default_factory=list)  # for the command's parser
    others: dict[str, Any] = field(default_factory=dict)  # values of other engines' options


def divide(words: Sequence[str], params: Iterable[Any], rows: Rows) -> Words:
    """Divide the words of a command line.

    `params` are the command's own parameters; `rows` describe other engines' options. Raises ValueError if another
    engine's option has no value. Unknown options are left to the command's parser, which reports them.
    """
    reader = _Reader(list(words), list(params), rows)
    while reader.left:
        reader.read_next()
    return reader.found


def find_row(rows: Rows, written: str) -> tuple[str, bool] | None:
    """Return the name of the row for the option `written`, and whether the option is negated; None without a row."""
    name = written.lstrip("-").replace("-", "_")
    if name in rows:
        return name, False
    positive = name.removeprefix("no_")
    return (positive, True) if positive in rows and rows[positive].switch else None


def is_number_of_other_kind(name: str, value: Any, rows: Rows) -> bool:
    """Return whether an integer option has a value such as "auto", which only other engines accept."""
    return name in INTEGERS and name in rows and isinstance(value, str) and re.fullmatch(r"-?\d+", value) is None


def with_unit(name: str, value: Any) -> Any:
    """Convert a number with a unit, such as 4k, to an integer if the option `name` takes integers.

    Other values are returned unchanged.
    """
    return read_length(value) if name in INTEGERS else value


class _Reader:
    def __init__(self, words: list[str], params: list[Any], rows: Rows) -> None:
        self.found, self.left = Words(), words
        self._rows = rows
        options = [param for param in params if param.param_type_name == "option"]
        self._options = {name: param for param in options for name in (*param.opts, *param.secondary_opts)}
        positional = [param for param in params if param.param_type_name != "option"]
        self._takes_many = any(param.nargs < 0 for param in positional)  # as many positional arguments as there are
        self._places = len(positional)  # positional arguments left
        self._names_model = any(word.partition("=")[0] == "--model" for word in words)
        self._objects: dict[str, int] = {}

    def read_next(self) -> None:
        word = self.left.pop(0)
        if word == "--":
            self.found.own += [word, *self.left]
            self.left.clear()
        elif not _is_option(word):
            self._places -= 1
            self.found.own.append(word)
        elif word not in self._options:
            written, equals, value = word.partition("=")
            if level := _LEVEL.fullmatch(written):
                written, equals, value = "-O", "=", level[1]
            name, _, keys = written.partition(".")
            self._read_option(word, self._known(name, keys), keys, [value] if equals else [])
        else:
            self._read_option(word, word, "", [])

    def _known(self, name: str, keys: str) -> str:
        """Return this engine's spelling of an option: dashes between words, and the long name of a short one."""
        if name in self._options:
            return name
        if name == "-O" and keys:
            name = "-cc"
        if name in SHORT or name.startswith("--"):
            return f"--{SHORT.get(name, name[2:]).replace('_', '-')}"
        return name

    def _read_option(self, word: str, name: str, keys: str, values: list[str]) -> None:
        """Read an option. `keys` are dotted keys after its name; `values` follow an equals sign."""
        param = self._options.get(name)
        if param is not None and param.is_flag and not keys:
            self.found.own.append("=".join([name, *values]))
        elif param is not None and (not keys or param.name in OBJECTS):
            self._add_own(name, param, keys, values or self._take(param.multiple and self._has_no_place_left))
        elif (found := find_row(self._rows, name)) is not None:
            row = self._rows[found[0]]
            if not (row.switch and not keys):
                values = values or self._take(row.several)
            self._add_other(*found, keys, values)
        else:
            self.found.own.append(word)

    @property
    def _has_no_place_left(self) -> bool:
        """Whether no positional argument, such as the model, is expected any more."""
        return not self._takes_many and (self._places <= 0 or self._names_model)

    def _take(self, several: bool) -> list[str]:
        """Remove and return the next word, or with `several` all words up to the next option."""
        taken = [self.left.pop(0)] if self.left else []
        while several and self.left and not _is_option(self.left[0]):
            taken.append(self.left.pop(0))
        return taken

    def _add_own(self, flag: str, param: Any, keys: str, values: list[str]) -> None:
        own = self.found.own
        for value in values:
            if param.name in OBJECTS and (keys or _mapping(value) is not None):
                mapping = _nested(keys, value)
                if flag in self._objects:  # further keys of the same object
                    place = self._objects[flag]
                    mapping = _merged(json.loads(own[place]), mapping)
                    own[place] = json.dumps(mapping)
                else:
                    own += [flag, json.dumps(mapping) if keys else value]
                    self._objects[flag] = len(own) - 1
            elif is_number_of_other_kind(param.name, str(number := with_unit(param.name, value)), self._rows):
                self.found.others[param.name] = value
            else:
                own += [flag, str(number)]
        if not values:
            own.append(flag)

    def _add_other(self, name: str, negated: bool, keys: str, values: list[str]) -> None:
        row, others = self._rows[name], self.found.others
        if row.switch and not keys:
            given = _value(values[0]) if values else True
            others[name] = not given if negated else given
            return
        if not values:
            raise ValueError(f"--{name.replace('_', '-')} has no value; allowed: a value after it")
        read: Any = [_value(value) for value in values] if row.several else _value(values[0])
        if row.several and len(read) == 1 and isinstance(read[0], list):
            (read,) = read
        if keys:
            read = _nested(keys, values[0])
        if isinstance(read, dict) and isinstance(others.get(name), dict):
            read = _merged(others[name], read)
        others[name] = read


def _is_option(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and re.fullmatch(r"-[\d.].*", word) is None


def _value(text: str) -> Any:
    """Parse a value as JSON, or as Python's True, False or None. Other text is returned unchanged."""
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except ValueError:
        return text


def _mapping(text: str) -> Any:
    value = _value(text)
    return value if isinstance(value, dict) else None


def _nested(keys: str, text: str) -> Any:
    """Parse a value and nest it in dicts by its dotted keys, if any."""
    value = _value(text)
    for key in reversed(keys.split(".") if keys else []):
        value = {key.replace("-", "_"): value}
    return value


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(one)
    for key, value in other.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
