"""Resolve the vision tower of a multimodal checkpoint, and the limits of image embeddings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compiled_engine.config import ImagesConfig, ModelConfig, ParallelConfig, SchedulerConfig
from compiled_engine.models.checkpoint.config_overrides import with_overrides
from compiled_engine.models.checkpoint.image_processor import image_processor_settings
from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.models.checkpoint.safetensors_files import tensor_names
from compiled_engine.models.checkpoint.wrappers import text_name
from compiled_engine.models.vision.description import describe_vision, why_not_described
from compiled_engine.options import EngineOptions
from compiled_engine.schema import require_defaults
from compiled_engine.vision import VisionDescription

# Most pixels of an image where neither the checkpoint nor the user states any.
MOST_PIXELS = 16_384 * 28 * 28
# Most tiles of an image by family, where neither states them: the defaults of transformers' processors.
MOST_TILES = {"internvl": 13, "idefics3": 17}
# Most embeddings of an image of Gemma 4 where neither states any: the default of transformers' processor.
SOFT_TOKENS = 280
# Last parts of the names of tensors that only quantised modules have.
_QUANTISED = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")
# Options that only engines with a tower have.
_NEEDING = ("encoder_cache_size", "max_num_encoder_input_tokens")


def resolve_images(
    options: EngineOptions,
    model: ModelConfig,
    scheduler: SchedulerConfig,
    parallel: ParallelConfig,
    attention_backend: str,
    settings: Mapping[str, Any],
    reasons: dict[str, str],
) -> ImagesConfig | None:
    """Return the vision tower and the limits of image embeddings, or None for an engine that reads no images.

    For a multimodal checkpoint, the reason for None is added to `reasons`. settings: the user's arguments for the
    checkpoint's image processor. Raises ValueError with the option, its value and what is allowed.
    """
    if model.wrapper is None:
        if model.speech is None:  # the encoder of a speech model has these limits too
            require_defaults(options, "the model takes only text", *_NEEDING)
        return None
    obstacle, vision, config = _obstacle(options, model, parallel), None, ""
    if obstacle is None:
        fields = JsonFields.from_file(model.path / "config.json")
        config = json.dumps(with_overrides(fields, json.loads(model.overrides or "{}")).values)
        vision = describe_vision(config)
        if vision is None:
            obstacle = f"the checkpoint is a {model.wrapper}: {why_not_described(config)}"
        elif (module := _quantised_module(model)) is not None:
            obstacle = f"its vision tower is quantised: {module}"
        elif vision.both_ways:
            length = vision.tile_embeddings or _most_of_image(vision, model.path, settings)
            obstacle = _obstacle_of_whole_images(vision, length, model, scheduler, attention_backend)
    if vision is None or obstacle is not None:
        require_defaults(options, obstacle or "", *_NEEDING)
        reasons["images"] = obstacle or ""
        return None
    most = min(_most_of_image(vision, model.path, settings), model.max_model_len - 1)
    step_size = options.max_num_encoder_input_tokens
    if step_size is None:
        step_size = scheduler.max_num_batched_tokens
        reasons["images.step_size"] = "as many as a step has tokens"
    cache_size = options.encoder_cache_size
    if cache_size is None:
        cache_size = max(step_size, most)
        reasons["images.cache_size"] = "as many as a step computes, or as the largest image has"
    return ImagesConfig(vision, config, min(most, cache_size), cache_size, step_size)


def _obstacle(options: EngineOptions, model: ModelConfig, parallel: ParallelConfig) -> str | None:
    """Return the reason why only the text model runs, even if the vision tower is supported; None if there is none."""
    if options.language_model_only:
        return "language_model_only is True"
    if model.pooling is not None:
        return "the model pools"
    if parallel.num_stages > 1:
        return f"pipeline_parallel_size is {parallel.num_stages}"
    if options.sequence_parallel:
        return "sequence_parallel is True"
    return None


def _quantised_module(model: ModelConfig) -> str | None:
    """Return the name of the first quantised module outside the text model; None if the checkpoint has none."""
    if model.quantisation is None:
        return None
    others = (name for name in tensor_names(model.path) if text_name(name) is None)
    return next((module for name in others for module, dot, kind in [name.rpartition(".")] if kind in _QUANTISED), None)


def _obstacle_of_whole_images(
    vision: VisionDescription, length: int, model: ModelConfig, scheduler: SchedulerConfig, attention_backend: str
) -> str | None:
    """Return why this engine cannot let the tokens of an image attend to each other; None if it can.

    length: the most tokens of an image that attend to each other.
    """
    why = "the tokens of an image see each other"
    limits = {
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_prefill_tokens": scheduler.max_prefill_tokens,
    }
    if not vision.both_ways_in_windows:
        limits["the sliding window"] = min((window for window in model.sliding_windows if window), default=None)
    for name, limit in limits.items():
        if limit is not None and limit < length:
            return f"{name} is {limit}, but {why}, and there are {length}"
    if attention_backend == "flash_attn":
        return f"attention_backend is flash_attn, but {why}"
    return None


def _most_of_image(vision: VisionDescription, folder: Path, settings: Mapping[str, Any]) -> int:
    """Return the most embeddings that an image can have after the processor has resized or divided it.

    folder: the checkpoint's, which has the image processor's settings. settings: the user's arguments for the
    processor, which take precedence.
    """
    values = {**(image_processor_settings(folder) or {}), **settings}
    if vision.stated_positions:
        stated = values.get("max_soft_tokens")
        return stated if isinstance(stated, int) and stated > 0 else SOFT_TOKENS

    def edge(name: str) -> int | None:
        found = values.get(name)
        return found.get("longest_edge") if isinstance(found, Mapping) else None

    sizes = values.get("size")
    pixels = [values.get("max_pixels"), sizes.get("max_pixels") if isinstance(sizes, Mapping) else None, edge("size")]
    most_pixels = next((each for each in pixels if isinstance(each, int) and each > 0), MOST_PIXELS)
    most_tiles = MOST_TILES.get(vision.family, 1)
    if isinstance(patches := values.get("max_patches"), int):
        most_tiles = patches + 1  # the whole image is one more
    elif (whole := edge("size")) and (tile := edge("max_image_size")):
        most_tiles = math.ceil(whole / tile) ** 2 + 1
    elif values.get("do_pan_and_scan"):
        most_tiles = int(values.get("pan_and_scan_max_num_crops") or 4) + 1
    return vision.most_embeddings(most_pixels, most_tiles)
