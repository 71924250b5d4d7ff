"""Checkpoints in four bits through the whole engine: each layout beside an oracle, odd sizes, and several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from packed_checkpoints import PACKINGS, Packing, write_packed
from test_quantised_engine import EVEN, IDS, IGNORED, ODD, ONE_LAYER, PROMPTS, compare

DECODED = pytest.mark.shown_by(
    "engine/test_packed_engine.py::test_each_layout_is_decoded",
    "engine/test_packed_engine.py::test_odd_sizes",
    "passes/test_quantise.py::test_a_broken_linear_is_caught",
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is not quantised."""
    make_checkpoint(folder := tmp_path_factory.mktemp("plain"), "llama", **EVEN)
    return folder


@pytest.mark.parametrize("name", PACKINGS)
def test_each_layout_is_decoded(name: str, plain: Path, tmp_path: Path) -> None:
    oracle = write_packed(plain, tmp_path, PACKINGS[name], IGNORED)
    compare(tmp_path, oracle, IDS, exact=True, mode="eager", strict_passes=False)


@DECODED
@pytest.mark.parametrize("name", PACKINGS)
def test_each_layout_computes_what_its_codes_stand_for(
    name: str, bundled_model_path: Path, bundled_tokenizer: Any, tmp_path: Path
) -> None:
    oracle = write_packed(bundled_model_path, tmp_path, PACKINGS[name], IGNORED)
    prompts = [bundled_tokenizer.hf(text)["input_ids"] for text in PROMPTS]
    compare(tmp_path, oracle, prompts, exact=True, compile_ranges=())


KINDS = ("compressed-tensors, zero points", "gptq, reordered", "awq")
ZEROS, REORDERED, AWQ = (PACKINGS[name] for name in KINDS)
# Columns of a row-parallel linear's share do not end with groups of 128.
SIZES = ODD | {"hidden_size": 216, "vocab_size": 136}


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize(
    ("family", "packing", "ignored", "changes", "options"),
    [
        ("llama", ZEROS, [], {"attention_bias": True, "tie_word_embeddings": False}, {"compile_ranges": (8,)}),
        ("qwen3", AWQ, ["lm_head"], {"tie_word_embeddings": True}, {"compile_ranges": ()}),
        ("phi3", REORDERED, ["lm_head"], {}, {"compile_ranges": ()}),
        ("llama", REORDERED, ["lm_head"], {"tie_word_embeddings": False}, {"model_impl": "transformers"}),
    ],
    ids=["llama, quantised head", "qwen3, tied", "phi3, fused", "transformers' code"],
)
def test_odd_sizes(
    family: str, packing: Packing, ignored: list[str], changes: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    make_checkpoint(tmp_path / "plain", family, **SIZES | ONE_LAYER | changes)
    oracle = write_packed(tmp_path / "plain", tmp_path / "packed", packing, ignored)
    compare(tmp_path / "packed", oracle, IDS, exact=True, **options)


# Codes on compiled ranks are those of NVFP4; what each rank reads of the others is verified on graphs.
@pytest.mark.shown_by(
    "engine/test_packed_experts.py::test_experts_in_nvfp4_stay_in_codes",
    "passes/test_quantise.py::test_a_broken_linear_is_caught",
    "passes/test_quantise.py::test_reordered_columns_that_ranks_divide_are_decoded",
)
@pytest.mark.parametrize("packing", [ZEROS, REORDERED, AWQ], ids=KINDS)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_have_parts_of_groups(packing: Packing, num_ranks: int, tmp_path: Path) -> None:
    """Shares end inside groups, and reordered columns are divided: those linears are decoded while they are loaded."""
    sizes = SIZES | ONE_LAYER | {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 352}
    make_checkpoint(tmp_path / "plain", "llama", **sizes | {"tie_word_embeddings": False})
    oracle = write_packed(tmp_path / "plain", tmp_path / "packed", packing, ["lm_head"])
    ranks: dict[str, Any] = {"tensor_parallel_size": num_ranks, "strict_passes": packing is not REORDERED}
    compare(tmp_path / "packed", oracle, IDS, exact=True, compile_ranges=(), **ranks)
