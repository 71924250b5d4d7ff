"""Layers that read the keys and values of an earlier layer, and heads that differ in size: Gemma 4 of small sizes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import WINDOW, Family, write_checkpoint
from family_comparison import OPTIONS, difference_after_passes, difference_of, fused_model
from safetensors.torch import load_file, save_file

from compiled_engine.config import EngineConfig
from compiled_engine.engine.cache_memory import allocate, block_bytes
from compiled_engine.features.kv_offload.extras import BLOCKS, Copies
from compiled_engine.features.kv_offload.host_rows import HostRows
from compiled_engine.features.kv_offload.step_host_blocks import StepHostBlocks
from compiled_engine.llm import LLM
from compiled_engine.models.checkpoint.build_model import build_tensors
from compiled_engine.models.checkpoint.loader import load_weights
from compiled_engine.models.checkpoint.parameters import materialize
from compiled_engine.other_engines.translate import make_options
from compiled_engine.passes.framework.parameter import KV_SCALES, Parameter
from compiled_engine.process.progress import SilentProgress
from compiled_engine.resolve.engine import resolve
from compiled_engine.sampling.params import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

NEAR, FAR = "sliding_attention", "full_attention"
# The last two of four layers have no keys and values of their own. Layers that attend to everything have wide heads.
SMALL = Family(
    "gemma4_text",
    {
        "num_hidden_layers": 4,
        "layer_types": [NEAR, FAR] * 2,
        "sliding_window": WINDOW,
        "num_kv_shared_layers": 2,
        "global_head_dim": 512,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 131,
        "pad_token_id": 0,
    },
)
EAGER: dict[str, Any] = {"mode": "eager", "device": "cpu"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder, and its model in transformers."""
    folder = tmp_path_factory.mktemp("gemma4")
    return folder, write_checkpoint(folder, SMALL)


def config_of(folder: Path) -> EngineConfig:
    given = {name: value for name, value in OPTIONS.items() if name != "progress"}
    return resolve(make_options(given | EAGER | {"model": folder, "dtype": "float32"}))


def test_chunks_decodes_and_prefix_hits_give_the_logprobs_of_transformers(checkpoint: tuple[Path, Any]) -> None:
    difference = difference_of(*checkpoint, EAGER)
    assert difference.is_right(torch.float32), difference
    assert difference.tokens_equal


@pytest.mark.product(one_in=24)
def test_the_graph_writes_each_cache_once(checkpoint: tuple[Path, Any]) -> None:
    folder, oracle = checkpoint
    model = fused_model(folder, {"device": "cpu"})
    difference = difference_after_passes(model, oracle)
    assert difference.is_right(torch.float32), difference
    reports = {report.name: report for report in model.reports}
    assert reports["foreign_attention"].matches == 4
    assert reports["rope_kv_write"].matches == reports["rope_kv_write"].contract == 2


def test_drafts_change_no_token_and_unused_keys_are_not_read(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    """A checkpoint may have weights for keys of layers that do not compute any, which transformers ignores too."""
    folder, oracle = checkpoint
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.2.self_attn.{name}.weight"] = tensors["model.layers.0.self_attn.k_norm.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    prompts = [[7, 8, 9] * 13, [3, 5] * 4]
    with LLM(tmp_path, **OPTIONS | EAGER | {"dtype": "float32", "speculative_config": NGRAM}) as llm:
        params = SamplingParams(temperature=0, max_tokens=20, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        assert llm.metrics()["draft_tokens"]
    for prompt, output in zip(prompts, outputs, strict=True):
        token_ids = list(output.outputs[0].token_ids)
        logits_TV = oracle(torch.tensor([prompt + token_ids])).logits[0]
        assert logits_TV[len(prompt) - 1 : -1].argmax(-1).tolist() == token_ids


def test_shared_keys_take_no_memory_of_their_own(checkpoint: tuple[Path, Any]) -> None:
    config = config_of(checkpoint[0])
    assert config.model.kv_layers == (0, 1, 0, 1)
    block_size = config.cache.block_size
    assert block_bytes(config) == 2 * block_size * (2 * 32 + 512) * 4
    assert block_bytes(replace(config, model=replace(config.model, kv_layers=None))) == 2 * block_bytes(config)
    caches = allocate(config, 3)
    assert [caches[0] is cache for cache in caches] == [True, False, True, False]
    assert caches[1] is caches[3]
    assert sum(cache.nbytes for cache in caches[:2]) == 3 * block_bytes(config)
    assert [tuple(cache.shape) for cache in caches[:2]] == [(3, 2, block_size, 2, 32), (3, 2, block_size, 1, 512)]


def test_blocks_in_host_memory_have_shared_keys_once(checkpoint: tuple[Path, Any]) -> None:
    config = config_of(checkpoint[0])
    caches = allocate(config, 4)
    for number, cache in enumerate(caches[:2]):
        cache.copy_(torch.arange(4.0).view(4, 1, 1, 1, 1) + 10 * number)
    distinct = [*{id(cache): cache for cache in caches}.values()]
    blocks = StepHostBlocks({BLOCKS: HostRows(lambda: distinct, 2, config.device)}, config.device, 0)
    try:
        blocks.start_up(SilentProgress())
        blocks.allocate(4)
        assert blocks.metrics()["kv_offload_bytes"] == 2 * block_bytes(config)
        blocks.save(0, {BLOCKS: Copies([1], [3], [])})
        blocks.load(1, {BLOCKS: Copies([1], [2], [])})
        assert [number for number, _ in blocks.arrived().loads] == [1]
    finally:
        blocks.close()
    assert [cache[:, 0, 0, 0, 0].tolist() for cache in caches[:2]] == [[0, 1, 3, 3], [10, 11, 13, 13]]


def test_readers_have_the_scales_of_the_layer_that_writes(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    shutil.copytree(checkpoint[0], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(2):
        for kind, scale in (("k", 0.5), ("v", 0.25)):
            tensors[f"model.layers.{layer}.self_attn.{kind}_scale"] = torch.tensor([scale + layer])
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    stated = json.loads((tmp_path / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    rules = {"config_groups": {}, "ignore": [], "kv_cache_scheme": scheme}
    stated["quantization_config"] = {"quant_method": "compressed-tensors"} | rules
    (tmp_path / "config.json").write_text(json.dumps(stated))
    config = config_of(tmp_path)
    heads = [config.model.heads_of(layer).num_kv_heads for layer in range(4)]
    leaves = [
        Parameter(f"attention.{layer}.{KV_SCALES}", (2, count), "float32", KV_SCALES)
        for layer, count in enumerate(heads)
    ]
    model = build_tensors(config.model, None)
    weights = materialize(model, leaves, config.device)
    load_weights(weights, model, config.model, SilentProgress())
    found = [weights.tensors[leaf.name][:, 0].tolist() for leaf in leaves]
    assert found == [[0.5, 0.25], [1.5, 1.25]] * 2
