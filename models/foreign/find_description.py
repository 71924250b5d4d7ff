"""Find the description of a transformers model in a cache file, or create it by importing the model's code."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path

import torch

from compiled_engine.models.foreign.description import IMPORTING, Description, description_file, read_file, write_file

log = logging.getLogger("compiled_engine")


def find_description(config_json: str, dtype: torch.dtype, cache_dir: Path | None) -> Description:
    """Return the description of a model, read from a cache file or, if there is none, made with transformers.

    config_json: text of the model's config.json. cache_dir: folder of the cache; the file is written if it is missing
    or damaged; None: no file is read or written. Raises ValueError for a model that the engine cannot run, and if the
    installed version of transformers is not supported.
    """
    path = description_file(config_json, dtype, cache_dir)
    if path is not None and path.is_file():
        try:
            return Description.from_json(read_file(path))
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("%s is damaged and made anew: %s", path, error)
    with IMPORTING:
        from compiled_engine.models.foreign.transformers_model import describe_model  # imports transformers

        description = describe_model(config_json, dtype)
    write_file(path, json.dumps(asdict(description)))
    return description
