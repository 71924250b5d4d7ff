"""Processors of tiny multimodal checkpoints: the files that checkpoints have beside their weights, made on the spot."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from vision_models import PLACEHOLDER, VOCAB_SIZE, vision_config

QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' or 'image_url' in part %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<start_of_image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
)
TEXT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
_QWEN = {"<|im_start|>": 300, "<|im_end|>": 301, "<|vision_start|>": 302, "<|vision_end|>": 303}
_QWEN |= {"<|image_pad|>": PLACEHOLDER, "<|video_pad|>": 311}
_GEMMA = {"<start_of_turn>": 300, "<end_of_turn>": 301, "<start_of_image>": 305, "<end_of_image>": 306}
_GEMMA |= {"<image_soft_token>": PLACEHOLDER}
# The tokens of Gemma 4 by the names that its processor looks for.
_GEMMA4 = {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
_GEMMA4 |= {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}
_SPECIALS = {
    "Qwen2_5_VLForConditionalGeneration": _QWEN,
    "Qwen3VLForConditionalGeneration": _QWEN,
    "Qwen2VLForConditionalGeneration": _QWEN,
    "Qwen3_5ForConditionalGeneration": _QWEN,
    "LlavaForConditionalGeneration": {"<image>": PLACEHOLDER},
    "LlavaNextForConditionalGeneration": {"<image>": PLACEHOLDER},
    "InternVLForConditionalGeneration": {"<img>": 305, "</img>": 306, "<video>": 311, "<IMG_CONTEXT>": PLACEHOLDER},
    "Idefics3ForConditionalGeneration": {
        "<fake_token_around_image>": 305,
        "<global-img>": 306,
        "<end_of_utterance>": 307,
        "<image>": PLACEHOLDER,
        **{f"<row_{row}_col_{column}>": 4 * row + column + 260 for row in range(1, 4) for column in range(1, 4)},
    },
    "Gemma3ForConditionalGeneration": _GEMMA,
    "Gemma4ForConditionalGeneration": dict(zip(_GEMMA4.values(), (PLACEHOLDER, 305, 306, 311, 312, 313), strict=True))
    | {"<|turn>": 300, "<turn|>": 301, "<|video|>": 314},
}
# The architectures that have a processor here.
PLACEHOLDERS = {
    "Qwen2_5_VLForConditionalGeneration": "<|image_pad|>",
    "Qwen3VLForConditionalGeneration": "<|image_pad|>",
    "Qwen2VLForConditionalGeneration": "<|image_pad|>",
    "Qwen3_5ForConditionalGeneration": "<|image_pad|>",
    "LlavaForConditionalGeneration": "<image>",
    "LlavaNextForConditionalGeneration": "<image>",
    "InternVLForConditionalGeneration": "<IMG_CONTEXT>",
    "Idefics3ForConditionalGeneration": "<image>",
    "Gemma3ForConditionalGeneration": "<start_of_image>",
    "Gemma4ForConditionalGeneration": "<|image|>",
}
_TEMPLATES = {
    "Gemma3ForConditionalGeneration": GEMMA_TEMPLATE,
    "Gemma4ForConditionalGeneration": GEMMA_TEMPLATE.replace("<start_of_image>", "<|image|>")
    .replace("<start_of_turn>", "<|turn>")
    .replace("<end_of_turn>", "<turn|>"),
    "LlavaForConditionalGeneration": TEXT_TEMPLATE,
}
_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_GRID: dict[str, Any] = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
_GRID |= {"size": {"shortest_edge": 64, "longest_edge": 4096}, "image_processor_type": "Qwen2VLImageProcessorFast"}
_TILE = {"height": 24, "width": 24}
_SETTINGS: dict[str, dict[str, Any]] = {
    "Qwen2_5_VLForConditionalGeneration": _GRID | {"processor_class": "Qwen2_5_VLProcessor"},
    "Qwen3VLForConditionalGeneration": _GRID | _HALF | {"processor_class": "Qwen3VLProcessor"},
    "LlavaForConditionalGeneration": {
        "processor_class": "LlavaProcessor",
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 24},
        "crop_size": _TILE,
    },
    "Qwen2VLForConditionalGeneration": _GRID | {"processor_class": "Qwen2VLProcessor"},
    "Qwen3_5ForConditionalGeneration": _GRID | _HALF | {"processor_class": "Qwen3VLProcessor"},
    "LlavaNextForConditionalGeneration": {
        "processor_class": "LlavaNextProcessor",
        "image_processor_type": "LlavaNextImageProcessor",
        "size": {"shortest_edge": 24},
        "crop_size": _TILE,
        "image_grid_pinpoints": [[24, 48], [48, 24], [48, 48], [72, 24], [24, 72]],
    },
    "InternVLForConditionalGeneration": {
        "processor_class": "InternVLProcessor",
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": _TILE,
        "min_patches": 1,
        "max_patches": 4,
    },
    "Idefics3ForConditionalGeneration": _HALF
    | {
        "processor_class": "Idefics3Processor",
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 84},
        "max_image_size": {"longest_edge": 28},
    },
    "Gemma3ForConditionalGeneration": _HALF
    | {"processor_class": "Gemma3Processor", "image_processor_type": "Gemma3ImageProcessor", "size": _TILE},
    "Gemma4ForConditionalGeneration": {
        "processor_class": "Gemma4Processor",
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "max_soft_tokens": 70,
    },
}
_LLAVA = {
    "patch_size": 4,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
    "image_token": "<image>",
}
_PROCESSORS: dict[str, dict[str, Any]] = {
    "LlavaForConditionalGeneration": _LLAVA,
    "LlavaNextForConditionalGeneration": _LLAVA,
    "InternVLForConditionalGeneration": {"image_seq_length": 9},
    "Idefics3ForConditionalGeneration": {"image_seq_len": 49},
    "Gemma3ForConditionalGeneration": {"image_seq_length": 9},
}


def write_processor(path: Path, architecture: str, template: str | None = None) -> Path:
    """Write the tokenizer, the image processor and the chat template of an architecture; return the folder."""
    specials = {"<pad>": 0, "<s>": 1, "</s>": 2} | _SPECIALS[architecture]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate(alphabet, 3)} | specials
    used = set(vocabulary.values())
    vocabulary |= {f"unused {index}": index for index in range(VOCAB_SIZE) if index not in used | {290, 291}}
    # Gemma's tokenizer joins line ends, so that those of an image join with those of the text.
    joined = {"\n\n": 290, "\n\n\n": 291}
    vocabulary |= joined
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in specials])
    if "Gemma3" in architecture:
        backend.add_tokens([AddedToken(text, normalized=False) for text in reversed(joined)])
    if "Qwen" not in architecture:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(path / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"}
    if "Gemma3" in architecture:
        tokens = (
            ("boi_token", "<start_of_image>"),
            ("eoi_token", "<end_of_image>"),
            ("image_token", "<image_soft_token>"),
        )
        config["extra_special_tokens"] = dict(tokens)
    if "Gemma4" in architecture:
        config |= {"extra_special_tokens": _GEMMA4, "pad_token": "<pad>"}
    if "InternVL" in architecture:
        names = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
        config["extra_special_tokens"] = names | {"video_token": "<video>"}
    files = {
        "tokenizer_config.json": config,
        "preprocessor_config.json": _SETTINGS[architecture],
        "processor_config.json": _PROCESSORS.get(architecture, {})
        | {"processor_class": _SETTINGS[architecture]["processor_class"]},
    }
    for name, values in files.items():
        (path / name).write_text(json.dumps(values), encoding="utf-8")
    (path / "chat_template.jinja").write_text(template or _TEMPLATES.get(architecture, QWEN_TEMPLATE), encoding="utf-8")
    if not (path / "config.json").exists():
        more = {"boi_token_index": 305} if "Gemma3" in architecture else {}
        (path / "config.json").write_text(vision_config(architecture, **more), encoding="utf-8")
    return path


def picture(width: int, height: int, seed: int = 0, mode: str = "RGB") -> PIL.Image.Image:
    """Return an image of random pixels."""
    channels = len(PIL.Image.new(mode, (1, 1)).getbands())
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return PIL.Image.fromarray(pixels if channels > 1 else pixels[..., 0]).convert(mode)


def as_file(image: PIL.Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return an image as the content of a file."""
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()
