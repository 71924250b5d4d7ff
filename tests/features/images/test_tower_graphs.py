"""CUDA graphs of vision towers on a CPU, where recorded work stands in for them: padding, sizes and counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_engines import Oracle, Prompt, check, config_of, outputs_of
from recorded_capture import RecordedCapture
from vision_models import ARCHITECTURES, random_image, save_vision_folder, small_vision_config, vision_config

from compiled_engine.attention.backend import get_backend
from compiled_engine.attention.case import GraphSupport, Support
from compiled_engine.config import EngineConfig, GraphConfig, GraphMode
from compiled_engine.engine import runner as model_runner
from compiled_engine.features.images.tower import Tower
from compiled_engine.graphs.cuda_graphs import dispatcher
from compiled_engine.graphs.cuda_graphs.capture import CudaCapture
from compiled_engine.graphs.cuda_graphs.dispatcher import GraphKey
from compiled_engine.graphs.cuda_graphs.manager import CudaGraphManager
from compiled_engine.models.vision import padded_inputs
from compiled_engine.models.vision.description import describe_vision
from compiled_engine.models.vision.inputs import tower_inputs, tower_tensors
from compiled_engine.models.vision.padded_inputs import MOST_IMAGES, fits, graph_sizes, padded_sizes
from compiled_engine.models.vision.tower_config import tower_config
from compiled_engine.options import EngineOptions
from compiled_engine.parallel.group import FakeGroup
from compiled_engine.process.progress import SilentProgress
from compiled_engine.processes.start_cores import start_core
from compiled_engine.resolve.engine import resolve
from compiled_engine.vision import VisionDescription

pytestmark = pytest.mark.usefixtures("one_thread")
QWEN = "Qwen3VLForConditionalGeneration"
GRAPHS = GraphConfig(GraphMode.FULL, (1, 2, 4), (8, 16, 32))
# Rounding differs with the number of rows of a matrix product.
TOLERANCE = 1e-5
Image = Mapping[str, torch.Tensor]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record work where a GPU captures it, and let the backend of towers on a CPU take part."""
    monkeypatch.setattr(model_runner, "CudaCapture", RecordedCapture)
    monkeypatch.setattr(get_backend("torch"), "accept", lambda case: Support(GraphSupport.ALWAYS))


def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture 4, 8 and 16 embeddings of four patches each, and steps with images of 16 and of 32 tokens."""
    monkeypatch.setattr(padded_inputs, "PATCHES", (16, 32, 64))
    monkeypatch.setattr(dispatcher, "PROMPT_SIZES", (16, 32))


class Replays:
    """Runs the work of a graph where an engine replays it. Notes the graphs, and the tokens of each call."""

    def __init__(self, tower: Tower) -> None:
        self.done: list[tuple[str, int]] = []
        graphs = tower.captured_by(self)
        assert graphs is not None
        self.graphs = graphs

    def __call__(self, key: GraphKey, num_tokens: int) -> torch.Tensor:
        self.done.append((key.name, num_tokens))
        return self.graphs.run(key)


def tower_of(folder: Path, architecture: str) -> Tower:
    """Return an eager tower with sizes for graphs."""
    save_vision_folder(folder, architecture)
    engine = resolve(EngineOptions(model=folder, mode="eager", device="cpu"))
    tower = Tower(engine, (folder / "config.json").read_text(), 400, FakeGroup(), SilentProgress())
    assert not tower.config.graph.captures
    sizes = graph_sizes(tower.description, tower.config.scheduler.max_num_batched_tokens)
    tower.config = replace(tower.config, graph=GraphConfig(GraphMode.FULL, token_sizes=sizes))
    return tower


def poisoned(tower: Tower, num_tokens: int) -> Image:
    """Return an image that has as many tokens as possible up to num_tokens, and no numbers for pixels."""
    description = tower.description
    count = num_tokens * description.tile_embeddings if description.tile_size else num_tokens
    image = max(
        (random_image(description, height, width) for height in range(1, 9) for width in range(1, 9)),
        key=lambda each: found if (found := tower.num_embeddings(each)) <= count else 0,
    )
    return {name: each * torch.nan if each.is_floating_point() else each for name, each in image.items()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_embeddings_do_not_depend_on_padding(architecture: str, tmp_path: Path) -> None:
    tower = tower_of(tmp_path, architecture)
    mixes = [[(3, 4)], [(2, 3), (1, 1), (5, 4)], [(7, 5), (1, 8)]]
    images = [[random_image(tower.description, *size, seed=seed) for seed, size in enumerate(mix)] for mix in mixes]
    expected = [tower.embed(mix) for mix in images]
    replays = Replays(tower)
    for mix, alone in zip(images, expected, strict=True):
        key = replays.graphs.key_for(tower_inputs(tower.description, mix, torch.float32))
        assert key is not None
        replays.graphs.fill(key)
        tower.embed([poisoned(tower, key.num_tokens)])
        replays.done.clear()
        found = tower.embed(mix)
        assert [name for name, _ in replays.done] == [f"tower {key.num_tokens}"]
        assert found.shape == alone.shape
        torch.testing.assert_close(found, alone, rtol=0, atol=TOLERANCE)
    assert replays.graphs.num_replays == 6


def test_calls_without_a_graph_run_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with more embeddings than the largest graph, and those with more images than a graph has rows for."""
    few_sizes(monkeypatch)
    monkeypatch.setattr(padded_inputs, "MOST_IMAGES", 2)
    tower = tower_of(tmp_path, QWEN)
    sizes = [((4, 4),), ((4, 5),), ((1, 1), (1, 1)), ((1, 1),) * 3]
    images = [[random_image(tower.description, *size, seed=seed) for seed, size in enumerate(mix)] for mix in sizes]
    expected = [tower.embed(mix) for mix in images]
    replays = Replays(tower)
    for mix, alone in zip(images, expected, strict=True):
        torch.testing.assert_close(tower.embed(mix), alone, rtol=0, atol=TOLERANCE)
    assert replays.done == [("tower 16", 16), ("tower 4", 2)]


def start(config: EngineConfig) -> Any:
    return start_core(config, SilentProgress())


@pytest.mark.usefixtures("captured")
def test_steps_replay_towers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are those of transformers; the large image has no graph, and nothing is compiled or captured later."""
    few_sizes(monkeypatch)
    oracle = Oracle(tmp_path, QWEN, small_vision_config(QWEN))
    small, large = oracle.image(2, 3, seed=1), oracle.image(4, 5, seed=2)
    prompts = {
        "one": Prompt((5, None, 11, 12, 13), (small,)),
        "large": Prompt((7, 8, None, 3), (large,)),
        "two": Prompt((None, 20, None, 22), (oracle.image(2, 2, seed=3), oracle.image(2, 2, seed=4))),
    }
    config = replace(config_of(oracle, mode="compiled", compile_ranges=()), graph=GRAPHS)
    core = start(config)
    before = core.metrics()
    assert [name for name in before["graph_bytes_by_key"] if "tower" in name] == ["tower 16", "tower 8", "tower 4"]
    for name, prompt in prompts.items():
        check(oracle, {name: prompt}, outputs_of(core, [oracle.request(name, prompt)]))
    after = core.metrics()
    core.close()
    replays = {name: count for name, count in after["graph_replays_by_key"].items() if not name.startswith("decode")}
    assert replays == {"tower 8": 2, "full 16 images 1": 2, "full 32 images 1": 1}
    assert (after["tower_runs"], after["tower_replays"]) == (3, 2)
    for name in ("compiles", "tower_compiles", "captures"):
        assert after[name] == before[name], name


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.FULL_DECODE_ONLY, GraphMode.BREAKABLE])
@pytest.mark.parametrize("architecture", ["Qwen2_5_VLForConditionalGeneration", "Gemma3ForConditionalGeneration"])
def test_full_graphs_hold_steps_with_images(
    architecture: str, mode: GraphMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With positions in three dimensions, and with keys ahead: graphs around attention cannot pass these to it."""
    few_sizes(monkeypatch)
    oracle = Oracle(tmp_path, architecture)
    prompts = {
        "small": Prompt((5, None, 11, 12), (oracle.image(2, 3, seed=1),)),
        "large": Prompt((7, None, 3, None), (oracle.image(3, 4, seed=2), oracle.image(1, 2, seed=3))),
    }
    sizes = (1, 2, 4) if mode.captures_decodes else ()
    graph = GraphConfig(mode, sizes, (8, 16, 32) if mode.captures_mixed else ())
    core = start(replace(config_of(oracle, mode="eager"), graph=graph))
    check(oracle, prompts, outputs_of(core, [oracle.request(*each) for each in prompts.items()], steps_between=3))
    metrics = core.metrics()
    core.close()
    assert (metrics["tower_runs"], metrics["tower_replays"]) == (2, 0)
    replays = [name for name in metrics["graph_replays_by_key"] if "images" in name]
    assert bool(replays) == (mode is GraphMode.FULL)


@pytest.mark.parametrize(
    ("mode", "graph", "support", "captures"),
    [
        ("compiled", GRAPHS, GraphSupport.ALWAYS, True),
        ("eager", GRAPHS, GraphSupport.ALWAYS, False),
        ("compiled", GraphConfig(GraphMode.NONE), GraphSupport.ALWAYS, False),
        ("compiled", GRAPHS, GraphSupport.NEVER, False),
    ],
    ids=["compiled", "eager", "no graphs", "no attention"],
)
def test_compiled_towers_have_graphs_where_steps_have(
    mode: str,
    graph: GraphConfig,
    support: GraphSupport,
    captures: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(get_backend("torch"), "accept", lambda case: Support(support))
    save_vision_folder(tmp_path, QWEN)
    config = replace(resolve(EngineOptions(model=tmp_path, mode=mode, device="cpu")), graph=graph)
    config_json = vision_config(QWEN)
    description = describe_vision(config_json)
    assert description is not None
    assert tower_config(config, description, config_json, 64).graph.captures == captures


# Heads of 80 and of 72 elements, which Triton's attention reads.
HEADS = {
    "Qwen2_5_VLForConditionalGeneration": {"hidden_size": 160, "num_heads": 2},
    QWEN: {"hidden_size": 144, "num_heads": 2},
}


@pytest.mark.gpu
@pytest.mark.usefixtures("exact_float32")
@pytest.mark.parametrize("architecture", HEADS)
def test_captured_towers_compute_the_same(architecture: str, tmp_path: Path) -> None:
    """Also for eight images, and for sizes without a graph; addresses stay, whatever was replayed before."""
    save_vision_folder(tmp_path, architecture, tower=HEADS[architecture])
    engine = resolve(EngineOptions(model=tmp_path, mode="graphed", device="cuda", dtype="float32", compile_workers=0))
    tower = Tower(engine, (tmp_path / "config.json").read_text(), 512, FakeGroup(), SilentProgress())
    assert tower.config.attention_backend == "triton"
    mixes = [[(4, 4)], [(3, 4)], [(7, 5), (1, 9)], [(2, 3)] * 8, [(16, 16)], [(15, 33)], [(1, 1)] * 17]
    images = [[random_image(tower.description, *size, seed=seed) for seed, size in enumerate(mix)] for mix in mixes]
    expected = [tower.embed(mix).clone() for mix in images]
    managers: list[CudaGraphManager] = []
    graphs = tower.captured_by(lambda key, num_tokens: managers[0].replay(key, None))
    assert graphs is not None
    managers.append(CudaGraphManager(dict.fromkeys(graphs.keys.values(), graphs), CudaCapture(engine.device)))
    assert managers[0].predict(lambda count: count) >= 0
    managers[0].capture_all(SilentProgress())
    assert managers[0].num_captures == len(tower.config.graph.token_sizes)
    for _ in range(2):
        for mix, alone in zip(images, expected, strict=True):
            torch.testing.assert_close(tower.embed(mix), alone, rtol=0, atol=TOLERANCE)
    assert graphs.num_replays == 2 * (len(mixes) - 1)
    managers[0].close()


def without_values(description: VisionDescription, size: tuple[int, int]) -> Image:
    """Return an image of a grid of size embeddings, or of size pixels, with pixels on the meta device."""
    if description.resolutions:
        sizes = torch.tensor([size])
        side = description.tile_size
        return {"pixel_values": torch.empty(9, 3, side, side, device="meta"), "image_sizes": sizes}
    grid = [1, *(length * description.merge_size for length in size)]
    pixels = torch.empty(math.prod(grid), description.patch_elements, device="meta")
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([grid])}


@settings(max_examples=60)
@given(
    st.sampled_from(["Qwen2_5_VLForConditionalGeneration", "LlavaNextForConditionalGeneration"]),
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=MOST_IMAGES),
    st.sampled_from([8, 16, 32]),
)
def test_every_shape_has_room(architecture: str, sizes: list[tuple[int, int]], window_size: int) -> None:
    """The number of tokens alone decides whether a graph holds images: windows and ends of rows never exceed it."""
    description = describe_vision(vision_config(architecture))
    assert description is not None
    if description.window_size:
        description = replace(description, window_size=window_size)
    inputs = tower_inputs(description, [without_values(description, size) for size in sizes], torch.float32)
    tensors = tower_tensors(description, torch.float32)
    num_tokens = len(inputs[tensors[0].name])
    for size in (num_tokens, num_tokens + 1, 2 * num_tokens):
        assert fits(description, tensors, inputs, padded_sizes(description, size))
    assert num_tokens == 1 or not fits(description, tensors, inputs, padded_sizes(description, num_tokens - 1))


@pytest.mark.parametrize(
    ("patches", "most", "expected"),
    [(1024, 5, (1, 2, 3, 4, 5)), (1024, 100, (1, 2, 3, 4, 5, 6, 7, 8)), (4096, 100, (1, 2)), (9000, 100, (1,))],
)
def test_sizes_of_tiles(patches: int, most: int, expected: tuple[int, ...]) -> None:
    description = describe_vision(vision_config("LlavaForConditionalGeneration"))
    assert description is not None
    assert graph_sizes(replace(description, tile_patches=patches), most) == expected


def test_padding_is_at_most_an_eighth_of_large_images() -> None:
    """With four patches to an embedding, as Qwen's towers have, from 512 embeddings on."""
    description = describe_vision(vision_config(QWEN))
    assert description is not None
    sizes = graph_sizes(description, 100_000)
    assert (sizes[0], sizes[-1]) == (16, 2048)
    assert {1024, 256} <= {*sizes}  # images of 1,024 x 1,024 and 512 x 512 pixels
    assert all(larger <= size * 9 / 8 for size, larger in pairwise(sizes) if size >= 512)
