"""Tiny multimodal models of transformers with random weights, and images as their processors prepare them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad

from compiled_engine.models.vision.inputs import tiles_of
from compiled_engine.vision import VisionDescription

Image = Mapping[str, torch.Tensor]
VOCAB_SIZE, PLACEHOLDER = 320, 310
_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GRID = {"hidden_size": 48, "num_heads": 4, "out_hidden_size": 64, "intermediate_size": 80, "patch_size": 4}
_TILES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 24,
    "patch_size": 4,
    "vision_use_head": False,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_GEMMA = {"query_pre_attn_scalar": 16, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 2}
_CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2_5_VLForConditionalGeneration": {
        "model_type": "qwen2_5_vl",
        "vision_config": _GRID | {"depth": 2, "window_size": 16, "fullatt_block_indexes": [1]},
        "text_config": _TEXT | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
    },
    "Qwen3VLForConditionalGeneration": {
        "model_type": "qwen3_vl",
        "vision_config": _GRID | {"depth": 4, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2]},
        "text_config": _TEXT
        | {"rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}},
    },
    "LlavaForConditionalGeneration": {
        "model_type": "llava",
        "vision_config": _TILES | {"model_type": "clip_vision_model"},
        "text_config": _TEXT | {"model_type": "llama"},
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    },
    "Qwen2VLForConditionalGeneration": {
        "model_type": "qwen2_vl",
        "vision_config": {"depth": 2, "embed_dim": 48, "hidden_size": 64, "num_heads": 4, "patch_size": 4},
        "text_config": _TEXT | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
    },
    "Qwen3_5ForConditionalGeneration": {
        "model_type": "qwen3_5",
        "vision_config": _GRID | {"depth": 2, "num_position_embeddings": 36},
        "text_config": _TEXT
        | _DELTA
        | {
            "head_dim": 32,
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25, "rope_theta": 1e4}
            | {"mrope_section": [2, 1, 1], "mrope_interleaved": True},
        }
        | {"layer_types": ["linear_attention", "full_attention"] * 2},
    },
    "LlavaNextForConditionalGeneration": {
        "model_type": "llava_next",
        "vision_config": _TILES | {"model_type": "clip_vision_model"},
        "text_config": _TEXT | {"model_type": "llama"},
        "image_grid_pinpoints": [[24, 48], [48, 24], [48, 48], [72, 24], [24, 72]],
    },
    "InternVLForConditionalGeneration": {
        "model_type": "internvl",
        "vision_config": _TILES
        | {
            "model_type": "internvl_vision",
            "image_size": [24, 24],
            "patch_size": [4, 4],
            "layer_scale_init_value": 1.0,
        },
        "text_config": _TEXT | {"model_type": "qwen2"},
        "tie_word_embeddings": False,
    },
    "SmolVLMForConditionalGeneration": {
        "model_type": "smolvlm",
        "vision_config": _TILES | {"model_type": "smolvlm_vision"},
        "text_config": _TEXT | {"model_type": "llama"},
        "scale_factor": 2,
    },
    "Idefics3ForConditionalGeneration": {
        "model_type": "idefics3",
        "vision_config": _TILES | {"model_type": "idefics3_vision", "image_size": 28, "patch_size": 2},
        "text_config": _TEXT | {"model_type": "llama"},
        "scale_factor": 2,
    },
    "Gemma3ForConditionalGeneration": {
        "model_type": "gemma3",
        "vision_config": _TILES | {"model_type": "siglip_vision_model"},
        "text_config": _TEXT | _GEMMA | {"model_type": "gemma3_text"},
        "mm_tokens_per_image": 9,
        "tie_word_embeddings": True,
    },
}
# As small checkpoints have it: embeddings of each layer, shared keys, clipped linears. As large ones: the rest.
_CONFIGS["Gemma4ForConditionalGeneration"] = {
    "model_type": "gemma4",
    "vision_config": {
        "model_type": "gemma4_vision",
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "position_embedding_size": 80,
        "use_clipped_linears": True,
        "standardize": True,
    },
    "text_config": {name: value for name, value in _TEXT.items() if name != "rope_theta"}
    | {
        "model_type": "gemma4_text",
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "use_bidirectional_attention": "vision",
    },
    "audio_config": None,
    "tie_word_embeddings": True,
}
# Fewer layers, for tests that compile them: each other one is a piece or two more.
_FEW_LAYERS: dict[str, dict[str, dict[str, Any]]] = {
    "Qwen3VLForConditionalGeneration": {
        "vision_config": {"depth": 2, "deepstack_visual_indexes": [0]},
        "text_config": {"num_hidden_layers": 2},
    },
    "LlavaForConditionalGeneration": {
        "vision_config": {"num_hidden_layers": 2},
        "text_config": {"num_hidden_layers": 1},
    },
}
ARCHITECTURES = tuple(_CONFIGS)
_BOUNDS = {"input_min": -1.5, "input_max": 1.2, "output_min": -0.4, "output_max": 0.5}
PLACEHOLDER_FIELD = dict.fromkeys(("llava", "llava_next", "gemma3"), "image_token_index")


def vision_config(architecture: str, *, tower: Mapping[str, Any] | None = None, **changes: Any) -> str:
    """Return the text of a tiny config.json. tower: changes of fields of vision_config. changes: of other fields."""
    values = _CONFIGS[architecture]
    values = values | {"vision_config": values["vision_config"] | dict(tower or {})}
    placeholder = {PLACEHOLDER_FIELD.get(values["model_type"], "image_token_id"): PLACEHOLDER}
    return json.dumps({"architectures": [architecture], "dtype": "float32"} | values | placeholder | changes)


def small_vision_config(architecture: str) -> str:
    """Return `vision_config` with fewer layers, for the architectures that have such a model here."""
    values = json.loads(vision_config(architecture))
    return json.dumps(values | {part: values[part] | few for part, few in _FEW_LAYERS[architecture].items()})


def vision_model(config_json: str, seed: int = 0) -> Any:
    """Return transformers' whole model with random weights, in float32 on the CPU."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    values = json.loads(config_json)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.05).add_(1.0 if parameter.dim() == 1 else 0.0)
        for name, buffer in model.named_buffers():  # of Gemma 4, which checkpoints hold
            kind = name.rpartition(".")[2]
            if kind in _BOUNDS:
                buffer.fill_(_BOUNDS[kind])
            elif kind in ("std_bias", "std_scale", "layer_scalar"):
                buffer.normal_(0.5, 0.1)
        if type(model).__name__.startswith("Gemma4"):
            model.get_output_embeddings().weight[PLACEHOLDER] = 0.0  # so that it is never the most probable token
    return model.eval().requires_grad_(False)


def save_vision_folder(
    path: Path, architecture: str, *, tower: Mapping[str, Any] | None = None, config_json: str | None = None
) -> Any:
    """Write a folder with config.json and the weights of `vision_model`, as transformers writes it; return the model.

    config.json is by default that of `vision_config`.
    """
    config_json = config_json or vision_config(architecture, tower=tower)
    model = vision_model(config_json)
    model.save_pretrained(path)
    (path / "config.json").write_text(config_json, encoding="utf-8")
    return model


def random_image(description: VisionDescription, height: int, width: int, seed: int = 0) -> Image:
    """Return an image as the processor prepares it: random pixels in a grid of these many merged rows and columns.

    Tiles have a fixed size: the image has as many as height and width divided by 4, at least one. LLaVA-NeXT gets an
    image of 10 * height x 10 * width pixels.
    """
    generator = torch.Generator().manual_seed(seed)
    if description.resolutions:
        size, sizes = description.tile_size, torch.tensor([[10 * height, 10 * width]])
        tiles = len(tiles_of(description, {"image_sizes": sizes, "pixel_values": torch.empty(9, 3, size, size)}))
        pixels = torch.randn(1, tiles, description.num_channels, size, size, generator=generator)
        return {"pixel_values": pixels, "image_sizes": sizes}
    if description.tile_size:
        size = description.tile_size
        tiles = 1 if description.family in ("llava", "gemma3") else max(1, height // 4) * max(1, width // 4)
        pixels = torch.randn(tiles, description.num_channels, size, size, generator=generator)
        return {"pixel_values": pixels}
    rows, columns = height * description.merge_size, width * description.merge_size
    pixels = torch.randn(rows * columns, description.patch_elements, generator=generator)
    if description.stated_positions:
        padding = (0, 0, 0, 2 * description.merged_patches)
        positions = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(-1)
        return {
            "pixel_values": pad(pixels, padding).unsqueeze(0),
            "image_position_ids": pad(positions, padding, value=-1).unsqueeze(0),
        }
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, rows, columns]])}


def images_together(model: Any, images: Sequence[Image]) -> dict[str, torch.Tensor]:
    """Return the arguments of transformers' model for these images."""
    if "image_position_ids" in images[0]:
        longest = max(image["pixel_values"].shape[1] for image in images)
        images = [
            {
                name: pad(each, (0, 0, 0, longest - each.shape[1]), value=-float(name == "image_position_ids"))
                for name, each in image.items()
            }
            for image in images
        ]
    given = {
        name: torch.cat([image[name].flatten(0, 1) if image[name].dim() == 5 else image[name] for image in images])
        for name in images[0]
    }
    if "vision_model" in dict(model.model.named_children()):
        given["pixel_values"] = given["pixel_values"].unsqueeze(0)
    return given


def image_features(model: Any, images: Sequence[Image]) -> torch.Tensor:
    """Return the embeddings of images, [E, elements of a row], by get_image_features of transformers' model.

    The embeddings of deepstack's levels follow those of the text model's input.
    """
    found = model.get_image_features(**images_together(model, images), return_dict=True)
    features = found.pooler_output
    if isinstance(features, torch.Tensor):
        features = list(features)
    features = [each.flatten(0, -2) for each in features]
    levels = [
        each if isinstance(each, torch.Tensor) else torch.cat(list(each))
        for each in getattr(found, "deepstack_features", None) or []
    ]
    return torch.cat([torch.cat(features), *levels], dim=-1)
