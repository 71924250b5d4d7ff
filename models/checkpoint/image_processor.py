"""Reads the settings of a checkpoint's image processor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compiled_engine.models.checkpoint.json_fields import JsonFields

# Files with the settings: WHOLE_FILE has them among the settings of the whole processor, SETTINGS_FILE has only them.
WHOLE_FILE, SETTINGS_FILE = "processor_config.json", "preprocessor_config.json"


def image_processor_settings(folder: Path) -> Mapping[str, Any] | None:
    """Return the settings of the image processor of the checkpoint in `folder`; None if it has none.

    If two files have settings, those of processor_config.json are returned, as in transformers. Raises ValueError for a
    damaged file.
    """
    path = folder / WHOLE_FILE
    if path.is_file() and isinstance(nested := JsonFields.from_file(path).values.get("image_processor"), Mapping):
        return nested
    path = folder / SETTINGS_FILE
    return JsonFields.from_file(path).values if path.is_file() else None
