"""The clip of a request, in the extras of EngineRequest: plain data that the frontend writes and the plan reads."""

from __future__ import annotations

from typing import Any

import msgspec

from compiled_engine.engine.messages import EngineRequest

NAME = "speech"


class PromptClip(msgspec.Struct, frozen=True, array_like=True):
    """The audio of a prompt, whose features follow when the core asks for them."""

    key: str  # hex digest of the audio; clips with the same key have the same keys and values


def clip_of(request: EngineRequest) -> PromptClip | None:
    """Return the clip of a request, if it has one."""
    given = request.extras.get(NAME)
    return None if given is None else msgspec.convert(given, PromptClip)


def extras_of(key: str) -> dict[str, Any]:
    """Return the extras of a request with this clip."""
    return {NAME: PromptClip(key)}
