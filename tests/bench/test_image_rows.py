"""Rows of the performance table whose prompts have images."""

from __future__ import annotations

from pathlib import Path

import pytest
from vision_models import vision_config

from compiled_engine.bench.bounds import Rates, model_sizes, tower_seconds, with_tower
from compiled_engine.bench.image_rows import FirstToken, RequestsWithImages, write_processor
from compiled_engine.bench.shapes import SHAPES, write_shape
from compiled_engine.bench.table import make_plan, measure
from compiled_engine.bench.table_rows import WITH_IMAGES
from compiled_engine.options import EngineOptions
from compiled_engine.process.progress import SilentProgress
from compiled_engine.resolve.engine import resolve

TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32}
TOWER = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "depth": 3, "out_hidden_size": 64}


def test_rows_with_images_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the sizes of a tiny model in the place of the shape's."""
    shape = SHAPES["qwen3-vl-8b"]
    rope = {"rope_type": "default", "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    small = {
        "text_config": shape["text_config"] | TEXT | {"num_key_value_heads": 2, "rope_scaling": rope},
        "vision_config": shape["vision_config"] | TOWER | {"deepstack_visual_indexes": [0, 1]},
    }
    monkeypatch.setitem(SHAPES, "qwen3-vl-8b", shape | small)
    given = {"device": "cpu", "mode": "eager", "num_blocks": 400, "image_workers": 1, "dtype": "float32"}
    limits, _ = WITH_IMAGES["image"]
    monkeypatch.setitem(WITH_IMAGES, "image", (limits, FirstToken(2, 128)))
    plan = make_plan(given, ["vl-8b-image"], with_curves=False, folder=tmp_path)
    (row,) = measure(plan, 1, SilentProgress(), lambda result: None)["rows"]
    assert row["measured"]["median"] > row["bound"] > 0
    assert row["what"] == "first token for 2 images of 128 x 128"


def test_bounds_grow_with_images(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(vision_config("Qwen3VLForConditionalGeneration"))
    (tmp_path / "preprocessor_config.json").write_text("{}")
    config = resolve(EngineOptions(model=tmp_path, load_format="dummy", device="cpu", max_num_batched_tokens=8192))
    assert config.images is not None
    sizes, rates = with_tower(model_sizes(config.model), config.images), Rates(1e9, 1e9, "")
    patches = 4 * 64
    of_attention = patches**2 * sizes.tower_attention_flops
    alone = 2 * (patches * sizes.patch_params + 64 * sizes.merger_params) + of_attention
    assert tower_seconds(sizes, rates, [64, 64]) == pytest.approx(2 * alone / 1e9)
    # Projections of 48 elements to q, k, v and back, and two of 80; patches of 2 frames of 4 x 4 pixels.
    assert sizes.patch_params == 4 * (4 * 48 * 48 + 2 * 48 * 80) + 3 * 2 * 16 * 48
    one, eight = (FirstToken(count, 1024).bound(sizes, rates, 8) for count in (1, 8))
    assert eight > 8 * one * 0.9
    text, images = (RequestsWithImages(4, (8, 8), (8, 8), side).bound(sizes, rates, 8) for side in (0, 512))
    assert images < text


def test_a_processor_has_the_tokens_of_the_shape(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_shape(tmp_path, "qwen3-vl-8b")
    write_processor(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path))
    assert tokenizer.convert_tokens_to_ids("<|image_pad|>") == SHAPES["qwen3-vl-8b"]["image_token_id"]
    assert tokenizer.convert_tokens_to_ids("<|vision_start|>") == SHAPES["qwen3-vl-8b"]["vision_start_token_id"]
