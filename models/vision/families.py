"""Lists the multimodal architectures whose vision towers the engine runs, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

PROJECTED = ("vision_tower", "multi_modal_projector")


@dataclass(frozen=True)
class Family:
    """A family of vision towers: facts that the config.json of a checkpoint does not state."""

    name: str
    # Modules and parameters of the base model that make up the tower. All others belong to the text model.
    modules: tuple[str, ...]
    reads_grids: bool = False  # the tower reads grids, otherwise tiles, see VisionDescription
    # Allowed values of vision_config.model_type; empty: any.
    vision_types: tuple[str, ...] = ()
    class_token: bool = False  # a tile's patches follow a class token
    # Default number of rotary frequencies for time, height and width; None: one position per token.
    mrope_section: tuple[int, ...] | None = None
    mrope_interleaved: bool = False
    both_ways: bool = False  # an image's tokens see the image's later tokens too
    stated_positions: bool = False  # of patches, see VisionDescription


QWEN2_VL = Family("qwen2_vl", ("visual",), reads_grids=True, mrope_section=(16, 24, 24))
QWEN2_5_VL = Family("qwen2_5_vl", ("visual",), reads_grids=True, mrope_section=(16, 24, 24))
QWEN3_VL = Family("qwen3_vl", ("visual",), reads_grids=True, mrope_section=(24, 20, 20), mrope_interleaved=True)
QWEN3_5 = Family("qwen3_5", ("visual",), reads_grids=True, mrope_section=(11, 11, 10), mrope_interleaved=True)
LLAVA = Family("llava", PROJECTED, vision_types=("clip_vision_model",), class_token=True)
LLAVA_NEXT = Family("llava_next", (*PROJECTED, "image_newline"), vision_types=("clip_vision_model",), class_token=True)
GEMMA3 = Family("gemma3", PROJECTED, vision_types=("siglip_vision_model",), both_ways=True)
GEMMA4 = Family(
    "gemma4",
    ("vision_tower", "embed_vision"),
    reads_grids=True,
    vision_types=("gemma4_vision",),
    stated_positions=True,
)
INTERNVL = Family("internvl", PROJECTED, vision_types=("internvl_vision",), class_token=True)
IDEFICS3 = Family("idefics3", ("vision_model", "connector"))

# Type of a vision model -> what keeps its code from being traced as one graph for images of any size.
UNTRACEABLE = {"pixtral": "loops over the sizes of the images, which cannot be traced whole"}

FAMILIES = {
    "Gemma3ForConditionalGeneration": GEMMA3,
    "Gemma4ForConditionalGeneration": GEMMA4,
    "Idefics3ForConditionalGeneration": IDEFICS3,
    "InternVLForConditionalGeneration": INTERNVL,
    "LlavaForConditionalGeneration": LLAVA,
    "LlavaNextForConditionalGeneration": LLAVA_NEXT,
    "Qwen2VLForConditionalGeneration": QWEN2_VL,
    "Qwen2_5_VLForConditionalGeneration": QWEN2_5_VL,
    "Qwen3VLForConditionalGeneration": QWEN3_VL,
    "Qwen3_5ForConditionalGeneration": QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": QWEN3_5,
    "SmolVLMForConditionalGeneration": IDEFICS3,
}
