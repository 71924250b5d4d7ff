"""From the keywords of `LLM` to the engine's options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from compiled_engine.options import EngineOptions
from compiled_engine.other_engines.translate import translate


def make_options(keywords: Mapping[str, Any]) -> EngineOptions:
    """The options that the keywords stand for, those of other engines included (see `translate`)."""
    device = str(keywords.get("device", "auto"))
    on_gpu = (device == "auto" or device.startswith("cuda")) and torch.cuda.is_available()
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in translate(keywords, on_gpu=on_gpu).items()
    }
    return EngineOptions(**values)
