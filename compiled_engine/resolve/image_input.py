"""Resolve how images of prompts are read and processed, or the reason why prompts may have none."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compiled_engine.config import ImageInput, ModelConfig
from compiled_engine.models.checkpoint.image_processor import SETTINGS_FILE, image_processor_settings
from compiled_engine.options import EngineOptions
from compiled_engine.process.cores import usable_cores
from compiled_engine.schema import is_integer, read_mapping, require_defaults, require_json
from compiled_engine.vision import VisionDescription

log = logging.getLogger("compiled_engine")

MOST_IMAGES = 999
MEDIA = ("image", "video", "audio")  # kinds that limits may name; prompts have images alone
GIB = 1 << 30
# Options that need a multimodal checkpoint. Without one, limit_mm_per_prompt may still allow no images.
_NEEDING = ("mm_processor_kwargs", "max_image_pixels", "image_workers", "allowed_media_domains")


def resolve_image_input(
    options: EngineOptions, model: ModelConfig, vision: VisionDescription | None, reasons: dict[str, str]
) -> ImageInput | None:
    """Return how images are read, or None if prompts may have none; the reason is then added to `reasons`.

    vision: the vision tower that runs; None if none does. Raises TypeError or ValueError with the option, its value and
    what is allowed.
    """
    folder = None if options.allowed_local_media_path is None else Path(options.allowed_local_media_path)
    if folder is not None and not folder.is_dir():
        raise ValueError(f"allowed_local_media_path is {str(folder)!r}; allowed: an existing folder")
    max_images = _max_images(options.limit_mm_per_prompt)
    settings = processor_settings(options)
    if model.wrapper is None:
        require_defaults(options, "the model takes only text", *_NEEDING)
    if vision is None or not max_images:
        reasons["image_input"] = _why_none(options, model, max_images, reasons)
        return None
    if image_processor_settings(model.path) is None:
        reasons["image_input"] = f"the checkpoint has no image processor ({SETTINGS_FILE})"
        log.warning("prompts may have no images: %s", reasons["image_input"])
        return None
    num_workers = options.image_workers
    if num_workers is None:
        num_workers = max(1, min(4, usable_cores() // 2))
        reasons["image_input.num_workers"] = "half of the cores, 1 to 4"
    return ImageInput(
        placeholder=_placeholder(model.path, vision),
        max_images=max_images,
        settings=dict(settings),
        cache_bytes=int(options.mm_processor_cache_gb * GIB),
        num_workers=num_workers,
        max_pixels=options.max_image_pixels,
        allowed_domains=options.allowed_media_domains,
        local_folder=folder,
    )


def processor_settings(options: EngineOptions) -> Mapping[str, Any]:
    """Return the user's arguments for the checkpoint's image processor, the option mm_processor_kwargs, as a dict.

    Raises TypeError or ValueError if the option is malformed.
    """
    settings = _read("mm_processor_kwargs", options.mm_processor_kwargs)
    require_json("mm_processor_kwargs", settings)
    return settings


def _read(name: str, given: Any) -> Mapping[str, Any]:
    """Return the option `name` as a dict. given: its value, a dict, JSON, or name=value,name=value.

    Raises TypeError or ValueError for anything else.
    """
    if isinstance(given, str) and re.fullmatch(r"\w+=[^,=]+(,\w+=[^,=]+)*", given):
        given = (
            "{" + ",".join(f'"{name}":{value}' for name, value in (each.split("=") for each in given.split(","))) + "}"
        )
    return read_mapping(name, given)


def _max_images(given: Any) -> int:
    """Return the most images per prompt. given: the option limit_mm_per_prompt.

    vLLM's form {"image": {"count": n}} is accepted too. Limits of video and audio are ignored. Raises TypeError or
    ValueError for anything else.
    """
    limits = _read("limit_mm_per_prompt", given)
    for kind in limits:
        if kind not in MEDIA:
            raise ValueError(f"limit_mm_per_prompt has {kind!r}; allowed: {', '.join(MEDIA)}")
    limit = limits.get("image", MOST_IMAGES)
    if isinstance(limit, dict):
        limit = limit.get("count", MOST_IMAGES)
    if not is_integer(limit) or limit < 0:
        raise ValueError(f"limit_mm_per_prompt is {given!r}; allowed: a number of images of at least 0")
    return int(limit)


def _why_none(options: EngineOptions, model: ModelConfig, max_images: int, reasons: dict[str, str]) -> str:
    if options.language_model_only:
        return "language_model_only is True"
    if model.wrapper is None:
        return "the model takes only text"
    if not max_images:
        return "limit_mm_per_prompt allows none"
    return reasons["images"]


def _placeholder(folder: Path, vision: VisionDescription) -> int:
    """Return the token id that stands for an image in prompts. folder: the checkpoint's.

    In Gemma 3 it differs from the token that is repeated for the image's embeddings.
    """
    stated = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return int(stated.get("boi_token_index", vision.image_token_id))
