"""Families whose layers ranks divide in a way of their own: recurrences, and Gemma 4.

The sizes of a rank, its memory, sums over ranks, and the tokens of two ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import WINDOW, Family, family, write_checkpoint
from family_comparison import difference_of, verified_passes
from transformers import AutoConfig, AutoModelForCausalLM

from compiled_engine.cli.device_plan import rank_plan
from compiled_engine.config import ModelConfig, Recurrences
from compiled_engine.engine.cache_memory import allocate, block_bytes
from compiled_engine.llm import LLM
from compiled_engine.models.foreign.transformers_model import build_foreign_model
from compiled_engine.other_engines.translate import make_options
from compiled_engine.parallel.rank_share import local_model, local_share
from compiled_engine.resolve.engine import resolve
from compiled_engine.resolve.parallel import check_model

SPACES = ("nemotron_h", "granitemoehybrid", "falcon_h1", "bamba")
DUMMY = {"device": "cpu", "dtype": "float32", "load_format": "dummy", "cache_dir": None, "skip_tokenizer_init": True}
# The last two of four layers have no keys and values of their own; embeddings by layer, whose vocabulary is divided.
GEMMA4 = Family(
    "gemma4_text",
    {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": WINDOW,
        "num_kv_shared_layers": 2,
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 132,
        "pad_token_id": 0,
    },
)
FAMILIES = (*SPACES, "kimi_linear", "bailing_hybrid", "qwen3_5_text", "qwen3_next")
DRAWN = pytest.mark.product(one_in=1000)
ALWAYS = ("nemotron_h", "granitemoehybrid", "kimi_linear")  # divided groups, a single one, and a delta rule


def write_config(name: str, folder: Path, **changes: Any) -> None:
    """Write the config.json of a family's tiny model, without weights."""
    config = AutoConfig.for_model(name, **{**family(name).to_divide().config(), **changes})
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)


def model_of(name: str, folder: Path, **changes: Any) -> ModelConfig:
    write_config(name, folder, **changes)
    return resolve(make_options({**DUMMY, "model": folder})).model


@pytest.mark.parametrize(
    "name",
    [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.product(one_in=1000)) for name in FAMILIES],
)
def test_states_of_a_rank_are_those_of_a_model_of_its_size(name: str, tmp_path: Path) -> None:
    """With groups that ranks divide, and with a single group, which each rank has."""
    model = model_of(name, tmp_path)
    check_model(model, 2)
    local = local_share(model, 2)
    assert local.recurrences is not None
    assert local.transformers is not None
    _, observed = build_foreign_model(local.transformers.config, local.dtype)
    assert local.recurrences.states == observed.states
    assert [heads.num_heads for heads in map(local.heads_of, range(local.num_layers))] == [
        layer.num_heads for layer in observed.attention
    ]


@pytest.mark.parametrize(
    ("name", "changes", "size", "counted"),
    [
        ("nemotron_h", {}, 8, "4 attention heads"),
        ("nemotron_h", {"num_attention_heads": 16}, 8, "4 n_groups"),
        ("nemotron_h", {"intermediate_size": 97}, 2, "97 rows of the MLP"),
        ("granitemoehybrid", {"shared_intermediate_size": 47}, 2, "47 rows of shared_intermediate_size"),
        ("bamba", {}, 4, "mamba_expand, 2"),
        ("kimi_linear", {"linear_num_heads": 3}, 2, "3 linear_num_heads"),
    ],
)
def test_counts_that_ranks_cannot_divide_are_refused(
    name: str, changes: dict[str, Any], size: int, counted: str, tmp_path: Path
) -> None:
    model = model_of(name, tmp_path, **changes)
    with pytest.raises(
        ValueError, match=f"tensor_parallel_size is {size}, which does not divide the model's {counted}; allowed"
    ):
        check_model(model, size)


@pytest.mark.usefixtures("one_thread")
@DRAWN
@pytest.mark.parametrize(
    "case", [GEMMA4, *map(family, ("gemma4_text", *FAMILIES))], ids=["gemma4, shared keys", "gemma4_text", *FAMILIES]
)
def test_two_ranks_give_transformers_log_probabilities(case: Family, tmp_path: Path) -> None:
    """Of one family without --all."""
    oracle = write_checkpoint(tmp_path, case.to_divide())
    difference = difference_of(tmp_path, oracle, {"mode": "eager", "device": "cpu", "tensor_parallel_size": 2})
    assert difference.is_right(torch.float32), difference
    assert difference.tokens_equal


# Granite: mixers, shared MLPs and experts of two layers, the norm of the first and the embedding. Falcon-H1: of each
# layer attention, the state space model and the MLP; groups are divided, and its norms with them. Delta rules: mixers
# and MLPs, with experts and shared ones instead of an MLP in one layer or in each.
SUMS = {
    "granitemoehybrid": 3 * 2 + 1 + 1,
    "falcon_h1": 3 * 2 + 1,
    **{
        "qwen3_5_text": 2 * 2 + 1,
        "qwen3_next": 3 * 2 + 1,
        "kimi_linear": 2 * 2 + 1 + 1,
        "bailing_hybrid": 2 * 2 + 1 + 1,
    },
}


@pytest.mark.product(one_in=1000, each=("divides_norm",))
@pytest.mark.parametrize(("name", "divides_norm"), [(name, name in ("granitemoehybrid", "falcon_h1")) for name in SUMS])
def test_sums_of_the_graph_are_those_of_the_undivided_model(name: str, divides_norm: bool, tmp_path: Path) -> None:
    """A norm over a whole row has a sum of its own; queries, keys and values of delta rules are joined."""
    write_checkpoint(tmp_path, family(name).to_divide().first_layers(2))
    reports = verified_passes(tmp_path, {"device": "cpu", "tensor_parallel_size": 2})
    sums = [report for report in reports if report.name == "tensor_parallel"]
    for report in sums:
        assert report.matches == report.contract == report.verified == SUMS[name]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "name", ["youtu", "kimi_linear", *(pytest.param(n, marks=DRAWN) for n in ("qwen3_5_text", "nemotron_h"))]
)
def test_memory_is_known_before_the_start(name: str, tmp_path: Path) -> None:
    """Latent rows of the KV cache, and states with room for drafts and snapshots: to the byte."""
    write_config(name, tmp_path)
    ngrams = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}
    given = {**DUMMY, "model": tmp_path, "mode": "eager", "num_blocks": 5, "speculative_config": ngrams}
    config = resolve(make_options({**given, "tensor_parallel_size": 2}))
    plan, alone = rank_plan(config), resolve(make_options(given))
    for each in (config, alone):
        caches = {cache.data_ptr(): cache.nbytes for cache in allocate(each, 5) if cache.nbytes}
        assert sum(caches.values()) == 5 * block_bytes(each) > 0
    assert plan.block_bytes == block_bytes(config)
    with LLM(tmp_path, **{key: value for key, value in given.items() if key != "model"}, progress=False) as llm:
        metrics = llm.metrics()
    assert metrics["kv_cache_bytes"] == 5 * block_bytes(alone)
    if (recurrences := alone.model.recurrences) is None:
        assert plan.state_bytes == metrics.get("state_bytes", 0) == 0
        assert (
            f"a block of {alone.cache.block_size} tokens has {block_bytes(alone):,}"
            in alone.reasons["model.latent_dim"]
        )
        return
    assert plan.state_bytes > 0
    assert metrics["state_bytes"] == _state_bytes(recurrences)
    assert (of_rank := local_model(config).recurrences) is not None
    assert plan.state_bytes == _state_bytes(of_rank)


def _state_bytes(recurrences: Recurrences) -> int:
    snapshots = recurrences.num_snapshots * recurrences.snapshot_bytes
    return recurrences.num_rows * recurrences.row_bytes + snapshots
