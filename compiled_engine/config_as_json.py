"""Configurations as JSON has them: nested, or flat under dotted names."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any


def json_value(value: Any) -> Any:
    """A configuration value as JSON has it: objects, lists, numbers, text."""
    if is_dataclass(value):
        return {field.name: json_value(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {key: json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value) if isinstance(value, Path) else str(value).removeprefix("torch.")


def flat_fields(value: Any, prefix: str = "") -> dict[str, Any]:
    """Every field of nested dataclasses as JSON has it, under its dotted name."""
    flat: dict[str, Any] = {}
    for field in fields(value):
        name, inner = prefix + field.name, getattr(value, field.name)
        flat |= flat_fields(inner, f"{name}.") if is_dataclass(inner) else {name: json_value(inner)}
    return flat
