"""Describe the vision tower of a multimodal checkpoint from its config.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from compiled_engine.models.foreign.description import IMPORTING
from compiled_engine.models.vision.families import FAMILIES, UNTRACEABLE, Family
from compiled_engine.vision import VisionDescription

# Families whose embeddings are computed from patches alone, without the tower's class token.
_WITHOUT_CLASS_TOKEN = ("internvl", "llava_next")


def describe_vision(config_json: str) -> VisionDescription | None:
    """Return the description of a checkpoint's vision tower; None if it has no tower that the engine runs.

    config_json: text of the checkpoint's config.json. Raises ValueError if the architecture is supported, but
    transformers refuses a field, or patches or tiles are not square.
    """
    values = json.loads(config_json)
    architecture = (values.get("architectures") or [""])[0]
    family = FAMILIES.get(architecture)
    if family is None or not values.get("vision_config"):
        return None
    config = read_vision_config(config_json)
    if family.vision_types and config.vision_config.model_type not in family.vision_types:
        return None
    if family.name in _WITHOUT_CLASS_TOKEN and config.vision_feature_select_strategy != "default":
        return None
    if family.stated_positions and not _is_supported_gemma4(config):
        return None
    described = _described(family, architecture, config)
    if described.mrope_section and sum(described.mrope_section) != _num_frequencies(config.get_text_config()):
        return None
    return described


def why_not_described(config_json: str) -> str:
    """Return the reason why the engine does not run the vision tower of a multimodal checkpoint.

    config_json: text of the checkpoint's config.json, for which `describe_vision` returns None.
    """
    values = json.loads(config_json)
    kind = (values.get("vision_config") or {}).get("model_type")
    family = FAMILIES.get((values.get("architectures") or [""])[0])
    strategy = values.get("vision_feature_select_strategy", "default")
    if family is not None and family.name in _WITHOUT_CLASS_TOKEN and strategy != "default":
        return f"vision_feature_select_strategy is {strategy!r} instead of 'default', and its text model runs alone"
    if kind in UNTRACEABLE:
        return f"its vision tower {kind} {UNTRACEABLE[kind]}, and its text model runs alone"
    return "its vision tower is not supported, and its text model runs alone"


def read_vision_config(config_json: str) -> Any:
    """Return transformers' configuration of a multimodal model, with defaults for missing fields.

    config_json: text of the checkpoint's config.json. Raises ValueError for fields that transformers refuses.
    """
    with IMPORTING:
        from transformers import AutoConfig  # takes seconds, and only multimodal models need it

        values = json.loads(config_json)
        kind = values.pop("model_type", None)
        try:
            return AutoConfig.for_model(kind, **values)
        except Exception as error:  # each field may raise errors of its own
            name = (values.get("architectures") or ["?"])[0]
            raise ValueError(f"it is no configuration of a {name}: {' '.join(str(error).split())}") from error


def _described(family: Family, architecture: str, config: Any) -> VisionDescription:
    text, vision = config.get_text_config(), config.vision_config
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    own_size = getattr(vision, "embed_dim", None) or vision.hidden_size
    num_heads = getattr(vision, "num_heads", None) or vision.num_attention_heads
    shared: dict[str, Any] = {
        "architecture": architecture,
        "family": family.name,
        "image_token_id": config.image_token_id,
        "embedding_size": text.hidden_size,
        "patch_size": _side(vision.patch_size),
        "num_layers": getattr(vision, "depth", None) or vision.num_hidden_layers,
        "num_heads": num_heads,
        "head_dim": own_size // num_heads,
        "mrope_section": family.mrope_section and tuple(rope.get("mrope_section", family.mrope_section)),
        "mrope_interleaved": family.mrope_interleaved,
        "both_ways": family.both_ways,
    }
    if family.stated_positions:
        has_own = getattr(text, "hidden_size_per_layer_input", 0)
        both_ways = text.use_bidirectional_attention == "vision"
        shared |= {"head_dim": vision.head_dim, "both_ways": both_ways, "both_ways_in_windows": both_ways}
        return VisionDescription(
            **shared,
            layer_token_id=text.pad_token_id if has_own else None,
            merge_size=vision.pooling_kernel_size,
            stated_positions=True,
            most_rows=vision.position_embedding_size,
        )
    if family.reads_grids:
        return VisionDescription(
            **shared,
            num_channels=vision.in_channels,
            levels=len(getattr(vision, "deepstack_visual_indexes", ())),
            temporal_patch_size=vision.temporal_patch_size,
            merge_size=vision.spatial_merge_size,
            window_size=getattr(vision, "window_size", 0),
            table_side=int(getattr(vision, "num_position_embeddings", 0) ** 0.5),
        )
    tile_size = _side(vision.image_size)
    patches = (tile_size // _side(vision.patch_size)) ** 2
    return VisionDescription(
        **shared,
        num_channels=vision.num_channels,
        tile_size=tile_size,
        tile_patches=patches + family.class_token,
        tile_embeddings=_TILE_EMBEDDINGS[family.name](config, patches),
        resolutions=tuple(map(tuple, config.image_grid_pinpoints)) if family.name == "llava_next" else (),
    )


def _is_supported_gemma4(config: Any) -> bool:
    """Return whether the engine runs the vision tower of a Gemma 4 checkpoint.

    The tower must have as many key heads as query heads. If the text model has embeddings in every layer, its config
    must state a padding token: in these layers, image tokens have the embedding of the padding token.
    """
    text, vision = config.get_text_config(), config.vision_config
    has_token = not text.hidden_size_per_layer_input or text.pad_token_id is not None
    return vision.num_key_value_heads == vision.num_attention_heads and has_token


def _num_frequencies(text: Any) -> int:
    """Return the number of rotary frequencies of a head of the text model. text: the text model's configuration."""
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    return int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2


# Family -> function that returns the number of embeddings of a tile, from the configuration and the number of patches
# without a class token.
_TILE_EMBEDDINGS: dict[str, Callable[[Any, int], int]] = {
    "gemma3": lambda config, patches: config.mm_tokens_per_image,
    "idefics3": lambda config, patches: patches // config.scale_factor**2,
    "internvl": lambda config, patches: round(patches * config.downsample_ratio**2),
    "llava": lambda config, patches: patches + (config.vision_feature_select_strategy == "full"),
    "llava_next": lambda config, patches: patches,
}


def _side(size: Any) -> int:
    """Return the side of a square. size: one number, or two equal numbers; raises ValueError if they differ."""
    sides = set(size) if isinstance(size, list | tuple) else {size}
    if len(sides) != 1:
        raise ValueError(f"the vision tower has patches or tiles of {size}; allowed: squares")
    return int(sides.pop())
