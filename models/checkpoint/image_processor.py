"""Reads the settings of a checkpoint's image processor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compiled_engine.models.checkpoint.json_fields import JsonFields

# Files with the settings: within those of the whole processor, or alone.
WHOLE_FILE, SETTINGS_FILE = "processor_config.json", "preprocessor_config.json"


def image_processor_settings(folder: Path) -> Mapping[str, Any] | None:
    """Return the settings from the file that transformers prefers; None if there is none.

    Raises ValueError for a damaged file.
    """
    path = folder / WHOLE_FILE
    if path.is_file() and isinstance(nested := JsonFields.from_file(path).values.get("image_processor"), Mapping):
        return nested
    path = folder / SETTINGS_FILE
    return JsonFields.from_file(path).values if path.is_file() else None
