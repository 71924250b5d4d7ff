"""Rows of the performance table whose prompts have images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from vision_models import vision_config

from compiled_engine.bench import ablation
from compiled_engine.bench.ablation import Asked
from compiled_engine.bench.bounds import Rates, model_sizes, tower_seconds, with_tower
from compiled_engine.bench.image_rows import FirstToken, RequestsWithImages, write_processor
from compiled_engine.bench.shapes import SHAPES, write_shape
from compiled_engine.bench.table import make_plan, measure
from compiled_engine.bench.table_rows import WITH_IMAGES
from compiled_engine.llm import LLM
from compiled_engine.options import EngineOptions
from compiled_engine.process.progress import SilentProgress
from compiled_engine.resolve.engine import resolve

TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32}
TOWER = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "depth": 3, "out_hidden_size": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has the files of a processor; tests write the shape."""
    write_processor(folder := tmp_path_factory.mktemp("processor"))
    return folder


@pytest.fixture
def small_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shape, with the sizes of a tiny model."""
    shape = SHAPES["qwen3-vl-8b"]
    rope = {"rope_type": "default", "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    small = {
        "text_config": shape["text_config"] | TEXT | {"num_key_value_heads": 2, "rope_scaling": rope},
        "vision_config": shape["vision_config"] | TOWER | {"deepstack_visual_indexes": [0, 1]},
    }
    monkeypatch.setitem(SHAPES, "qwen3-vl-8b", shape | small)


@pytest.mark.usefixtures("small_shape")
def test_rows_with_images_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"device": "cpu", "mode": "eager", "num_blocks": 400, "image_workers": 1, "dtype": "float32"}
    limits, _ = WITH_IMAGES["image"]
    monkeypatch.setitem(WITH_IMAGES, "image", (limits, FirstToken(2, 128)))
    plan = make_plan(given, ["vl-8b-image"], with_curves=False, folder=tmp_path)
    (row,) = measure(plan, 1, SilentProgress(), lambda result: None)["rows"]
    assert row["measured"]["median"] > row["bound"] > 0
    assert row["what"] == "first token for 2 images of 128 x 128"


@pytest.mark.usefixtures("small_shape")
def test_an_ablation_measures_a_prompt_with_an_image(folder: Path) -> None:
    """Of an eager engine here. The text model alone is another variant."""
    write_shape(folder, "qwen3-vl-8b")
    given = {"model": str(folder), "load_format": "dummy", "device": "cpu", "image_workers": 1, "dtype": "float32"}
    plan = ablation.make_plan(given, None, Asked(quick=True, variants=("eager", "compiled without images")))
    assert (plan.workload.image_side, plan.workload.image_len) == (256, 64)
    eager, alone = (variant.engine_options(plan.shared) for variant in plan.variants)
    assert resolve(EngineOptions(**alone | {"model": folder})).images is None
    with LLM(**eager, progress=False) as llm:
        found = replace(plan.workload, batch_sizes=(1,), prefill_prompts=1, num_steps=2, output_len=3).measure(llm)
        assert llm.metrics()["tower_images"] == 2  # the first one warms up
    assert found["image_ms"] > 0


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


def test_a_processor_has_the_tokens_of_the_shape(folder: Path) -> None:
    from transformers import AutoTokenizer

    write_shape(folder, "qwen3-vl-8b")
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    assert tokenizer.convert_tokens_to_ids("<|image_pad|>") == SHAPES["qwen3-vl-8b"]["image_token_id"]
    assert tokenizer.convert_tokens_to_ids("<|vision_start|>") == SHAPES["qwen3-vl-8b"]["vision_start_token_id"]
