"""The extras of weight updates: the version of the weights, in the output with a request's first token."""

from __future__ import annotations

from typing import Any

NAME = "weights"
"""Name of the feature on the device, and of its part of an EngineOutput's extras."""


def version_in(extras: dict[str, Any]) -> str | None:
    """Return the version of the weights from the extras of an output, if it has one."""
    version: str | None = extras.get(NAME)
    return version
