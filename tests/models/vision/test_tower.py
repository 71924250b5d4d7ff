"""Vision towers, eager and compiled, against get_image_features of transformers' whole model."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._dynamo.utils import counters
from vision_models import ARCHITECTURES, image_features, random_image, save_vision_folder

from compiled_engine.features.images.tower import Tower
from compiled_engine.graphs.cache.key import cache_factors
from compiled_engine.models.vision.inputs import blank_image, largest_images, num_embeddings, tiles_of
from compiled_engine.models.vision.tower import positions_of_patches
from compiled_engine.options import EngineOptions
from compiled_engine.parallel.group import FakeGroup
from compiled_engine.process.progress import SilentProgress
from compiled_engine.resolve.engine import resolve

pytestmark = pytest.mark.usefixtures("one_thread")
Sizes = Sequence[tuple[int, int]]
MOST = 1200
ONE, SEVERAL, SAME = ((3, 4),), ((2, 3), (1, 1), (5, 4)), ((2, 5),) * 3
WINDOWS_CUT = ((7, 5), (1, 9))
# Matches of fusing passes in each tower's graph.
MATCHES = {
    "layer_norm": {
        **{"Qwen2VL": 5, "Qwen3VL": 11, "Qwen3_5": 5, "Llava": 4, "LlavaNext": 4, "Gemma3": 7},
        **{"InternVL": 7, "SmolVLM": 7, "Idefics3": 7},
    },
    "residual_rms_norm": {"Qwen2_5_VL": 4},
    "rms_norm": {"Qwen2_5_VL": 1},
    "merge_linears": {"Qwen2_5_VL": 2, "Llava": 2, "Gemma3": 3, "InternVL": 3, "SmolVLM": 3},
    "silu_mul": {"Qwen2_5_VL": 2},
    "gated_linear": {"Qwen2_5_VL": 2},
}


def make_tower(folder: Path, mode: str, group: FakeGroup | None = None, **options: Any) -> Tower:
    given = {"model": str(folder), "mode": mode, "device": "cpu", "strict_passes": mode != "eager"} | options
    engine = resolve(EngineOptions(**given))
    return Tower(engine, (folder / "config.json").read_text(), MOST, group or FakeGroup(), SilentProgress())


def difference(tower: Tower, whole: Any, sizes: Sizes) -> float:
    images = [random_image(tower.description, *size, seed=seed) for seed, size in enumerate(sizes)]
    expected = image_features(whole, images)
    found = tower.embed(images)
    assert found.shape == expected.shape
    assert [len(found)] == [sum(map(tower.num_embeddings, images))]
    assert expected.std() > 0.1
    return (found.cpu() - expected).abs().max().item()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    made: dict[str, tuple[Path, Any]] = {}

    def of(architecture: str) -> tuple[Path, Any]:
        if architecture not in made:
            folder = tmp_path_factory.mktemp(architecture)
            made[architecture] = folder, save_vision_folder(folder, architecture)
        return made[architecture]

    return of


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_eager_embeddings_are_those_of_transformers(architecture: str, folders: Callable[[str], Any]) -> None:
    folder, whole = folders(architecture)
    tower = make_tower(folder, "eager")
    for sizes in (ONE, SEVERAL, SAME, WINDOWS_CUT):
        assert difference(tower, whole, sizes) < 1e-5
    assert tower.embed(tower.largest()).shape[1] == tower.description.row_size


# With windows, and with matches of most passes.
COMPILED = "Qwen2_5_VLForConditionalGeneration"
OTHERS = pytest.mark.shown_by(
    "models/vision/test_tower.py::test_one_compiled_graph_serves_all_sizes",
    "features/images/test_image_engine.py::test_tokens_are_those_of_the_whole_model",
)


@pytest.mark.parametrize(
    "architecture", [name if name == COMPILED else pytest.param(name, marks=OTHERS) for name in ARCHITECTURES]
)
def test_one_compiled_graph_serves_all_sizes(architecture: str, folders: Callable[[str], Any]) -> None:
    folder, whole = folders(architecture)
    tower = make_tower(folder, "compiled")
    assert tower.counts.traces == 1
    drawn = random.Random(7)
    mixes = [[(drawn.randint(1, 8), drawn.randint(1, 8)) for _ in range(drawn.randint(1, 4))] for _ in range(20)]
    before = copy.deepcopy(counters)
    for mix in mixes:
        assert difference(tower, whole, mix) < 1e-5
    assert counters == before
    assert tower.counts.traces == 1
    assert tower.compiled is not None
    (compiled,) = tower.compiled.ranges
    name = architecture.removesuffix("ForConditionalGeneration")
    matches = {report.name: report.matches for report in compiled.passes}
    expected = {graph_pass: counts[name] for graph_pass, counts in MATCHES.items() if name in counts}
    assert {graph_pass: matches[graph_pass] for graph_pass in expected} == expected


# Prefixes of the base model's modules that transformers has written. The first is that of transformers 5.
PREFIXES = {
    "visual": ("model.visual", "visual"),
    "vision_tower": (
        "model.vision_tower",
        "vision_tower",
        "vision_tower.vision_model",
        "model.vision_tower.vision_model",
    ),
    "embed_vision": ("model.embed_vision", "embed_vision"),
    "multi_modal_projector": ("model.multi_modal_projector", "multi_modal_projector"),
    "image_newline": ("model.image_newline", "image_newline"),
}
# transformers has named the layers of a vision model's class in this way for some families only.
WITHOUT_VISION_MODEL = ("InternVLForConditionalGeneration", "Gemma4ForConditionalGeneration")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_prefix_is_read(architecture: str, folders: Callable[[str], Any], tmp_path: Path) -> None:
    folder, whole = folders(architecture)
    tensors = {name: tensor.contiguous() for name, tensor in whole.state_dict().items() if name != "lm_head.weight"}
    for number in range(2 if architecture in WITHOUT_VISION_MODEL else 4):
        renamed = {}
        for name, tensor in tensors.items():
            module = name.split(".")[1]
            prefixes = PREFIXES.get(module, (f"model.{module}",))
            prefix = prefixes[min(number, len(prefixes) - 1)]
            renamed[prefix + name.removeprefix(f"model.{module}")] = tensor
        save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        assert difference(make_tower(tmp_path, "eager"), whole, SEVERAL) < 1e-5


def test_missing_tensors_of_the_tower_are_named(folders: Callable[[str], Any], tmp_path: Path) -> None:
    folder, _ = folders(ARCHITECTURES[0])
    tensors = load_file(folder / "model.safetensors")
    gone = next(name for name in tensors if name.endswith("visual.merger.ln_q.weight"))
    del tensors[gone]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match=r"1 missing: model\.visual\.merger\.ln_q\.weight"):
        make_tower(tmp_path, "eager")


def test_padded_tiles_are_refused(folders: Callable[[str], Any]) -> None:
    tower = make_tower(folders("SmolVLMForConditionalGeneration")[0], "eager")
    image = dict(random_image(tower.description, 3, 2))
    image["pixel_attention_mask"] = torch.ones(1, 24, 24)
    tower.embed([image])
    image["pixel_attention_mask"][0, 20:] = 0
    with pytest.raises(ValueError, match="SmolVLMForConditionalGeneration has padding; allowed: images cut into"):
        tower.embed([image])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_random_weights_need_no_tensors(architecture: str, folders: Callable[[str], Any], tmp_path: Path) -> None:
    folder, _ = folders(architecture)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tower = make_tower(tmp_path, "eager", load_format="dummy")
    image = random_image(tower.description, 3, 2)
    found = tower.embed([image])
    assert found.shape == (num_embeddings(tower.description, image), tower.description.row_size)
    assert found.isfinite().all()


def test_blank_images_have_as_many_embeddings_as_asked_for(folders: Callable[[str], Any]) -> None:
    for architecture in ARCHITECTURES:
        description = make_tower(folders(architecture)[0], "eager").description
        for wanted in (1, 40, 99, 100, 121):
            found = num_embeddings(description, blank_image(description, wanted))
            if description.resolutions:
                assert found <= max(wanted, 120)  # that of the smallest resolution
            elif description.tile_size:
                assert found == max(1, wanted // description.tile_embeddings) * description.tile_embeddings
            else:
                assert wanted * 0.9 <= found <= wanted


def test_the_start_runs_as_many_tiles_as_a_step_may_have(folders: Callable[[str], Any]) -> None:
    """Images of LLaVA-NeXT have several tiles each, and thin ones have few embeddings for them."""
    description = make_tower(folders("LlavaNextForConditionalGeneration")[0], "eager").description
    for wanted in (120, 200, 400, 1200):
        images = largest_images(description, wanted)
        assert sum(num_embeddings(description, image) for image in images) <= wanted
        num_tiles = sum(len(image["pixel_values"]) for image in images)
        for size in ((24, 24), (48, 48), (9, 72), (72, 3), (24, 72), (48, 24), (1, 200)):
            image = {"pixel_values": torch.zeros(9, 3, 24, 24), "image_sizes": torch.tensor([size])}
            count = wanted // num_embeddings(description, image)
            assert count * len(tiles_of(description, image)) <= num_tiles <= description.most_tiles(wanted)


def test_options_of_the_text_model_have_no_effect(folders: Callable[[str], Any]) -> None:
    folder, whole = folders(COMPILED)
    plain = make_tower(folder, "compiled").config
    for options in ({"kv_cache_dtype": "fp8_e4m3"}, {"enable_lora": True}, {"quantization": "fp8"}):
        tower = make_tower(folder, "compiled", **options)
        assert cache_factors(tower.config) == cache_factors(plain)
        assert tower.counts.compiles == 0
        assert difference(tower, whole, SEVERAL) < 1e-5
    second = make_tower(folder, "eager", FakeGroup(2, rank=1), tensor_parallel_size=2)
    assert difference(second, whole, SEVERAL) < 1e-5


# Heads of 80, 72 and 64 elements, as Qwen2.5-VL, SigLIP and CLIP have them.
SIZES_ON_A_GPU = {
    "Qwen2_5_VLForConditionalGeneration": {"hidden_size": 160, "num_heads": 2},
    "Qwen3VLForConditionalGeneration": {"hidden_size": 144, "num_heads": 2},
    "Gemma3ForConditionalGeneration": {"hidden_size": 144, "num_attention_heads": 2},
    "LlavaForConditionalGeneration": {"hidden_size": 128, "num_attention_heads": 2},
}


@pytest.mark.gpu
@pytest.mark.usefixtures("exact_float32")
@pytest.mark.parametrize("mode", [pytest.param("eager", marks=pytest.mark.product(one_in=4)), "compiled"])
@pytest.mark.parametrize("architecture", SIZES_ON_A_GPU)
def test_embeddings_on_a_gpu_are_those_of_transformers(architecture: str, mode: str, tmp_path: Path) -> None:
    whole = save_vision_folder(tmp_path, architecture, tower=SIZES_ON_A_GPU[architecture])
    tower = make_tower(tmp_path, mode, device="cuda", dtype="float32")
    assert tower.config.attention_backend == "triton"
    before = copy.deepcopy(counters)
    for sizes in (ONE, SEVERAL, SAME, WINDOWS_CUT, ((30, 40),)):
        assert difference(tower, whole, sizes) < 1e-4
    assert counters == before


@pytest.mark.parametrize("side", [14, 19, 32])
def test_positions_of_patches_are_those_of_transformers(side: int) -> None:
    """With 19 patches on a side, the coordinates of two neighbours are rounded to one position."""
    from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
    from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings

    sizes = {"hidden_size": 8, "num_attention_heads": 2, "image_size": 2 * side, "patch_size": 2}
    embeddings = Idefics3VisionEmbeddings(Idefics3VisionConfig(**sizes))
    mask = torch.ones(1, side, side, dtype=torch.bool)
    (expected,) = embeddings(torch.zeros(1, 3, 2 * side, 2 * side), patch_attention_mask=mask)
    found = embeddings.position_embedding(positions_of_patches(side)) + embeddings.patch_embedding.bias
    assert torch.equal(found, expected)
    numbers = positions_of_patches(side)
    assert torch.equal(numbers, torch.arange(side**2)) == (side != 19)
