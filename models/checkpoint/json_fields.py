"""Read typed fields of a JSON object. A wrong field raises ValueError with the file, the field and its value."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# First bytes of a Git LFS pointer: the short text that replaces a large file in a checkout without Git LFS.

_FIRST_BYTES = b"version https://git-lfs.github.com/spec/"
# Most characters of a value shown in an error.
_LONGEST_VALUE = 500


def is_lfs_pointer(path: Path) -> bool:
    """Return whether the file is a Git LFS pointer; False if it does not exist."""
    try:
        with path.open("rb") as file:
            return is_lfs_text(file.read(len(_FIRST_BYTES)))
    except OSError:
        return False


def is_lfs_text(first: bytes) -> bool:
    """Return whether a file that begins with the bytes `first` is a Git LFS pointer; False for fewer than 8 bytes."""
    return len(first) >= 8 and first[: len(_FIRST_BYTES)] == _FIRST_BYTES[: len(first)]


def describe_lfs_pointer(path: Path) -> str:
    """Return the error message for a file that is only a Git LFS pointer."""
    return (
        f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder, or download the file anew"
    )


@dataclass(frozen=True)
class JsonFields:
    """The fields of one JSON object, with methods that return a field's value and check its type.

    If a field is missing or null, these methods return `default`. They raise ValueError if `default` is None, or if the
    value is not allowed.
    """

    source: str  # origin of the object, for errors
    values: dict[str, Any]

    @classmethod
    def from_file(cls, path: Path) -> JsonFields:
        """Read a JSON file.

        Raises ValueError if the file is missing, not readable, a Git LFS pointer, not JSON, or not an object.
        """
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            raise ValueError(f"{path} is missing{_what_is_there(path.parent)}") from None
        except OSError as error:  # such as a folder
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
        return cls.from_text(path, text)

    @classmethod
    def from_text(cls, path: Path, text: bytes) -> JsonFields:
        """Parse `text`, the content of the file `path`. Raises the errors of `from_file`."""
        try:
            if not text.strip():
                raise ValueError("it is empty")
            values = json.loads(text.decode())
        except (ValueError, RecursionError) as error:
            if is_lfs_text(text):
                raise ValueError(describe_lfs_pointer(path)) from error
            raise ValueError(f"{path} is damaged, it is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold a JSON object, got a {type(values).__name__}")
        return cls(str(path), values)

    def replaced(self, **values: Any) -> JsonFields:
        """Return a copy in which each field named by a keyword has the keyword's value."""
        return JsonFields(self.source, self.values | values)

    def __contains__(self, name: str) -> bool:
        """Return whether the field is present and not null."""
        return self.values.get(name) is not None

    def error(self, name: str, allowed: str) -> ValueError:
        value = repr(self.values.get(name))
        shown = value if len(value) <= _LONGEST_VALUE else f"{value[:_LONGEST_VALUE]}..."
        return ValueError(f"{self.source}: {name} must be {allowed}, got {shown}")

    def require(self, name: str, holds: bool, allowed: str) -> None:
        """Raise ValueError unless `holds`. The error states the value of the field `name`, and `allowed`."""
        if not holds:
            raise self.error(name, allowed)

    def require_values(self, instead: str = "", **supported: Any) -> None:
        """Raise ValueError unless each field named by a keyword is missing, null or equal to the keyword's value.

        instead: appended to the error, such as a hint at an alternative.
        """
        for name, value in supported.items():
            shown = value if isinstance(value, str) else json.dumps(value)
            self.require(name, self.values.get(name) in (None, value), f"{shown}{instead}")

    def one_of(self, name: str, allowed: Collection[str], default: str | None = None, *, instead: str = "") -> str:
        """Return the field's string, which must be one of `allowed`. instead: as in `require_values`."""
        value = self.text(name, default)
        self.require(name, value in allowed, f"one of {', '.join(allowed)}{instead}")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        """Return the field's value, which must be a whole number of at least 1."""
        value = self._value(name, default)
        if type(value) is not int or value < 1:
            raise self.error(name, "a whole number of at least 1")
        return value

    def nullable_integer(self, name: str, absent: int | None) -> int | None:
        """Return the field's whole number, at least 1; None if the field is null, `absent` if it is missing."""
        if name not in self:
            return None if name in self.values else absent
        return self.integer(name)

    def number(self, name: str, default: float | None = None) -> float:
        """Return the field's value, which must be a finite number above 0."""
        value = self._value(name, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise self.error(name, "a number above 0")
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return the field's list, which must hold at least one number, all finite and above 0."""
        value = self._value(name, None)
        are_numbers = isinstance(value, list) and value and all(type(each) in (int, float) for each in value)
        if not are_numbers or not all(math.isfinite(each) and each > 0 for each in value):
            raise self.error(name, "a list of finite numbers above 0")
        return tuple(map(float, value))

    def token_id(self, name: str) -> int | None:
        """Return the field's whole number of at least 0; None if the field is missing or null."""
        value: int | None = self.values.get(name)
        self.require(name, value is None or _is_token_id(value), "a token id")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Return the field's list of token ids; an empty one if the field is missing or null."""
        value = self._value(name, [])
        self.require(name, isinstance(value, list) and all(map(_is_token_id, value)), "a list of token ids")
        return tuple(value)

    def boolean(self, name: str, default: bool | None = None) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def texts(self, name: str) -> list[str]:
        """Return the field's list, which must hold at least one string and nothing else."""
        value = self._value(name, None)
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise self.error(name, "a list of strings")
        return value

    def section(self, name: str) -> JsonFields:
        """Return the JSON object in the field; an empty one if the field is missing or null."""
        value = self._value(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return JsonFields(f"{self.source}: {name}", value)

    def _value(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None and default is None:
            raise ValueError(f"{self.source}: the field {name} is missing")
        return default if value is None else value


def _is_token_id(value: Any) -> bool:
    return type(value) is int and value >= 0


def _what_is_there(folder: Path) -> str:
    """Return the end of an error about a missing file, if the folder holds an adapter or GGUF files; "" otherwise."""
    if (folder / "adapter_config.json").exists():
        return "; the folder holds an adapter (adapter_config.json): merge it into its base model first"
    if any(folder.glob("*.gguf")):
        return "; the folder holds GGUF files; allowed: safetensors files with a config.json"
    return ""
