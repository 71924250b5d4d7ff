"""Folders of EAGLE-3 heads: the three spellings are one head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import head_config, random_tensors, specforge_config, speculators_config, write_head

from compiled_engine.config import HeadConfig, ModelConfig
from compiled_engine.models.bundled import BUNDLED_MODEL_PATH
from compiled_engine.models.checkpoint.config_reader import read_model_config
from compiled_engine.models.checkpoint.eagle3_folder import (
    EMBEDDING,
    draft_tokens,
    has_embedding,
    head_tensors,
    read_head,
)
from compiled_engine.models.checkpoint.safetensors_files import map_tensors


@pytest.fixture(scope="module")
def target() -> ModelConfig:
    model, _ = read_model_config(
        BUNDLED_MODEL_PATH, dtype="float32", max_model_len=None, load_format="auto", seed=0, device_type="cpu"
    )
    return model


def config(**changes: Any) -> dict[str, Any]:
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    return head_config(BUNDLED_MODEL_PATH, draft_vocab_size=50, norm_before_residual=False, **ids, **changes)


def read(folder: Path, target: ModelConfig) -> tuple[ModelConfig, list[int]]:
    return read_head(folder, target, 2048, "safetensors")


def test_three_spellings_are_one_head(target: ModelConfig, tmp_path: Path) -> None:
    written = config()
    tensors = random_tensors(written)
    # What training alone reads, and the prefix of some checkpoints.
    more = tensors | {"t2d": torch.zeros(4096, dtype=torch.bool)}
    prefixed = {name if name in ("d2t", "t2d") else f"model.{name}": tensor for name, tensor in more.items()}
    folders = [
        write_head(tmp_path / "original", written, more, layer="midlayer"),
        write_head(tmp_path / "specforge", specforge_config(written), prefixed, layer="midlayer"),
        write_head(tmp_path / "speculators", speculators_config(written), tensors),
    ]
    for folder in folders:
        head, layers = read(folder, target)
        assert layers == [1, 3, 5]
        assert head.head == HeadConfig(target_size=256, num_aux_layers=3, vocab_size=50)
        assert (head.vocab_size, head.num_heads, head.num_kv_heads, head.head_dim) == (4096, 4, 2, 16)
        assert (head.max_model_len, head.dtype) == (2048, torch.float32)
        assert not has_embedding(head)
        read_tensors = head_tensors(map_tensors(folder), head)
        assert read_tensors.pop(EMBEDDING).is_meta
        expected = {name: tensor for name, tensor in tensors.items() if name != "d2t"}
        assert read_tensors.keys() == expected.keys()
        assert all(torch.equal(read_tensors[name], expected[name]) for name in expected)
        assert torch.equal(draft_tokens(head), tensors["d2t"] + torch.arange(50))


def test_what_is_absent(target: ModelConfig, tmp_path: Path) -> None:
    """Defaults: the usual layers, the model's vocabulary, and for speculators norm_before_residual."""
    written = head_config(BUNDLED_MODEL_PATH)
    del written["eagle_aux_hidden_state_layer_ids"]
    embedding = {EMBEDDING: torch.zeros(4096, 256)}
    first = write_head(tmp_path / "first", written, random_tensors(written) | embedding)
    head, layers = read(first, target)
    assert layers == [2, 3, 3]
    assert head.head == HeadConfig(target_size=256, num_aux_layers=3, vocab_size=4096)
    assert has_embedding(head)
    assert torch.equal(draft_tokens(head), torch.arange(4096))
    second = write_head(tmp_path / "second", speculators_config(written), random_tensors(written))
    assert read(second, target)[0].head == HeadConfig(256, 3, 4096, norm_before_residual=True)


def test_random_weights_need_no_files(target: ModelConfig, tmp_path: Path) -> None:
    folder = write_head(tmp_path, config(), {"none": torch.zeros(1)})
    head, _ = read_head(folder, target, 2048, "dummy")
    assert not has_embedding(head)
    assert torch.equal(draft_tokens(head), torch.arange(50))
