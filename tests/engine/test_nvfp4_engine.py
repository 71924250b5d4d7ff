"""Checkpoints in NVFP4 through the whole engine: each format beside an oracle, and several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from nvfp4_checkpoints import FORMATS, MODELOPT, write_nvfp4
from test_quantised_engine import IDS, ODD, ONE_LAYER, PROMPTS, compare

IGNORED = ["lm_head", "model.layers.2.mlp.down_proj"]


@pytest.mark.parametrize("form", FORMATS)
def test_each_format_is_decoded(form: str, bundled_model_path: Path, bundled_tokenizer: Any, tmp_path: Path) -> None:
    oracle = write_nvfp4(bundled_model_path, tmp_path, form, IGNORED)
    prompts = [bundled_tokenizer.hf(text)["input_ids"] for text in PROMPTS]
    compare(tmp_path, oracle, prompts, exact=True, mode="eager", strict_passes=False)


# Attention's linears are in NVFP4 there too; shares of linears that end inside groups are verified on graphs.
@pytest.mark.shown_by(
    "engine/test_packed_experts.py::test_experts_in_nvfp4_stay_in_codes",
    "passes/test_quantise.py::test_a_broken_linear_is_caught",
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_codes_are_computed_with(num_ranks: int, tmp_path: Path) -> None:
    """Shares of two ranks end inside groups."""
    sizes = ODD | ONE_LAYER | {"tie_word_embeddings": False, "vocab_size": 136, "intermediate_size": 328}
    make_checkpoint(tmp_path / "plain", "llama", **sizes)
    oracle = write_nvfp4(tmp_path / "plain", tmp_path / "nvfp4", MODELOPT, ["lm_head"])
    compare(tmp_path / "nvfp4", oracle, IDS, exact=True, compile_ranges=(), tensor_parallel_size=num_ranks)
