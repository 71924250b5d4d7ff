"""The cache key changes when the compiled graph does, and only then; and each factor that differs is named in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_config
from vision_models import vision_config

from compiled_engine.config import (
    AdapterConfig,
    DraftConfig,
    EngineConfig,
    ExpertsConfig,
    GraphMode,
    HeadShape,
    ImagesConfig,
    Recurrences,
    RopeConfig,
    TransformersModel,
    flat_fields,
)
from compiled_engine.graphs.cache.diff import differences
from compiled_engine.graphs.cache.entry import factors_key
from compiled_engine.graphs.cache.environment import (
    Environment,
)
from compiled_engine.graphs.cache.key import (
    ANGLE_SCALE_FIELDS,
    CACHE_FORMAT,
    FOR_HEADS,
    GRAPH_FIELDS,
    OTHER_FIELDS,
    RANK_PACKAGES,
    RECURRENCE_PACKAGES,
    cache_factors,
    graph_config,
)
from compiled_engine.graphs.compiler.build import apply_passes, trace_rank
from compiled_engine.graphs.compiler.settings import INDUCTOR_OPTIONS
from compiled_engine.graphs.compiler.signature import compile_ranges, forward_signature
from compiled_engine.graphs.compiler.split import make_plan, split
from compiled_engine.graphs.compiler.trace import without_storage
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.models.vision.description import describe_vision
from compiled_engine.parallel.rank_share import local_model
from compiled_engine.pooling import Dense, Pooling
from compiled_engine.quantisation import Rule, online

ENVIRONMENT = Environment(
    versions={"torch": "2.13.0", "cuda": None},
    device={"type": "cpu", "instructions": ["avx2", "fma"]},
    compiler={"version": "g++ 12.2.0"},
    settings={"inductor": {"cpp.dynamic_threads": True}, "environment": {}},
    profile={"noise_us": 2.0, "gains_us": {"silu_mul": {"8": 1.5}}},
    source={"passes/linear/silu_mul.py": "aaaa", "graphs/split.py": "bbbb"},
)


def base_config() -> EngineConfig:
    """One tiny layer whose every field can matter: yarn scales cos and sin, and small batches end at the logits."""
    rope = RopeConfig(10000.0, "yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.5)
    experts = ExpertsConfig(4, 2, 32)
    return tiny_config(num_layers=1, compile_ranges=(8,), rope=rope, experts=experts)


# Another value for every field.
PERTURBED: dict[str, Any] = {
    "model.path": Path("/elsewhere"),
    "cache.host_blocks": 5,
    "cache.host_states": 2,
    "model.hub_name": "org/name",
    "model.merged_adapter": Path("/an/adapter"),
    "model.wrapper": "LlavaForConditionalGeneration",
    "model.overrides": '{"rope_theta": 5.0}',
    "model.revision": "0" * 40,
    "model.architecture": "LlamaForCausalLM",
    "model.vocab_size": 103,
    "model.hidden_size": 128,
    "model.intermediate_size": 128,
    "model.num_layers": 2,
    "model.num_heads": 2,
    "model.num_kv_heads": 4,
    "model.head_dim": 32,
    "model.max_position_embeddings": 77,
    "model.rms_norm_eps": 3e-4,
    "model.rope.theta": 5e5,
    "model.rope.kind": "default",
    "model.rope.factor": 8.0,
    "model.rope.original_max_position_embeddings": 128,
    "model.rope.low_freq_factor": 2.0,
    "model.rope.high_freq_factor": 8.0,
    "model.rope.beta_fast": 16.0,
    "model.rope.beta_slow": 2.0,
    "model.rope.attention_factor": 1.5,
    "model.rope.mscale": 0.5,
    "model.rope.mscale_all_dim": 0.25,
    "model.rope.truncate": False,
    "model.rope.short_factor": (1.0, 2.0),
    "model.rope.long_factor": (3.0, 4.0),
    "model.tie_word_embeddings": False,
    "model.qkv_bias": True,
    "model.attention_out_bias": True,
    "model.mlp_bias": True,
    "model.sliding_windows": (8,),
    "model.layer_heads": (HeadShape(4, 1, 16),),
    "model.latent_dim": 8,
    "model.key_dim": 12,
    "model.value_dim": 8,
    "model.attention_scale": 0.5,
    "model.attention_soft_cap": 50.0,
    "model.attention_sinks": (0,),
    "model.linear_biases": True,
    "model.num_biases": 9,
    "model.refused_id": 1,
    "model.logit_soft_cap": 30.0,
    "model.local_rope_theta": 5e5,
    "model.experts.count": 5,
    "model.experts.per_token": 3,
    "model.experts.intermediate_size": 48,
    "model.experts.renormalise": True,
    "model.experts.dense_layers": (0,),
    "model.dtype": torch.bfloat16,
    "model.max_model_len": 99,
    "model.load_format": "dummy",
    "model.seed": 7,
    "tokenizer": Path("/elsewhere"),
    "cache.block_size": 32,
    "cache.num_blocks": 5,
    "cache.gpu_memory_utilization": 0.5,
    "cache.enable_prefix_caching": False,
    "cache.kv_dtype": "fp8_e4m3",
    "scheduler.max_num_seqs": 3,
    "scheduler.max_num_batched_tokens": 128,
    "scheduler.max_model_len": 99,
    "scheduler.policy": "priority",
    "scheduler.async_scheduling": True,
    "scheduler.max_prefill_tokens": 64,
    "compile.enabled": False,
    "compile.passes": ("merge_linears",),
    "compile.ranges": ((1, 4), (5, 8)),
    "compile.strict": True,
    "compile.verify": True,
    "compile.workers": 3,
    "compile.cache_dir": None,
    "compile.plugins": ("my_passes",),
    "graph.mode": GraphMode.FULL_DECODE_ONLY,
    "graph.decode_sizes": (1, 2),
    "graph.short_decodes": ((1, 64), (2, 64)),
    "graph.short_verified": ((1, 64), (2, 64)),
    "graph.token_sizes": (1, 2),
    "parallel.tensor_parallel_size": 2,
    "parallel.stage_layers": (2, 4),
    "parallel.collectives": "nccl",
    "parallel.executor": "multiprocess",
    "parallel.data_parallel_size": 2,
    "attention_backend": "triton",
    "reasons": {"device": "another"},
    "sleeps": True,
    "logprobs_mode": "processed_logprobs",
    "batch_invariant": True,
    "speculation.method": "ngram",
    "speculation.num_tokens": 3,
    "speculation.lookup_max": 5,
    "speculation.lookup_min": 2,
    "speculation.acceptance_rates": (0.5,),
    "speculation.aux_layers": (0,),
    "speculation.reads_hidden": True,
    "speculation.adapts": True,
    "speculation.sharpnesses": (3.0,),
}
# A device that is not there cannot be traced for; see test_the_environment_is_part_of_the_key. What a model of
# transformers adds: see test_foreign_models.py.
APART = {"device", "model.transformers", "model.quantisation", "model.pooling", "model.causal", "model.token_types"}
APART |= {"model.length_angles", "model.kv_layers"}
APART |= {"model.recurrences", "model.head", "model.vision", "model.speech", "speculation.draft", "adapters"}
APART |= {"images", "image_input", "speech"}
APART |= {"kv_events", "cache.block_files"}


def with_value(value: Any, field: str, new: Any) -> Any:
    name, _, rest = field.partition(".")
    return replace(value, **{name: with_value(getattr(value, name), rest, new) if rest else new})


def architecture_with(field: str) -> str:
    """One whose graph has what the field is about."""
    if field.startswith("model.experts."):
        return "Qwen3MoeForCausalLM"
    return "Gemma2ForCausalLM" if field == "model.logit_soft_cap" else "Qwen3ForCausalLM"


def perturbed(config: EngineConfig, field: str) -> EngineConfig:
    if field == "model.num_layers":
        config = with_value(config, "model.sliding_windows", (None,) * PERTURBED[field])
    return with_value(config, field, PERTURBED[field])


def versions(config: EngineConfig) -> Iterator[Any]:
    """What a compiler would be given: its options, then for each range its plan and its unique pieces."""
    yield INDUCTOR_OPTIONS, compile_ranges(config)
    model = without_storage(build_model(local_model(config)), config.device)
    traced = trace_rank(config, model, forward_signature(config))
    for compile_range in compile_ranges(config):
        module, _ = apply_passes(config, traced, compile_range)
        plan, pieces = make_plan(module.graph, split(module.graph))
        yield compile_range, plan, pieces


def final_graph(config: EngineConfig) -> list[Any]:
    return list(versions(config))


def differs(config: EngineConfig, graph: list[Any]) -> bool:
    """Whether the graph of the config is another one: it is made as far as the first difference."""
    return any(one != other for one, other in zip_longest(versions(config), graph))


@pytest.fixture(scope="module")
def base() -> EngineConfig:
    return base_config()


def test_every_field_is_perturbed(base: EngineConfig) -> None:
    assert flat_fields(base).keys() == PERTURBED.keys() | APART
    for field in PERTURBED:
        assert flat_fields(perturbed(base, field))[field] != flat_fields(base)[field]


def test_every_field_is_declared_once(base: EngineConfig) -> None:
    assert sorted([CACHE_FORMAT, *FOR_HEADS, *GRAPH_FIELDS, *ANGLE_SCALE_FIELDS, *OTHER_FIELDS]) == sorted(
        flat_fields(base)
    )


def test_the_head_of_a_model_that_pools_changes_the_key(base: EngineConfig) -> None:
    plain = Pooling("embed", ("lasttoken",), (), "normalise")
    variants = (None, plain, replace(plain, head=(Dense("2_Dense", 64, 8),)))
    keys = [str(cache_factors(with_value(base, "model.pooling", each), ENVIRONMENT)) for each in variants]
    assert len(set(keys)) == 3
    prompted = with_value(base, "model.pooling", replace(plain, prompts=(("query", "find: "),)))
    assert str(cache_factors(prompted, ENVIRONMENT)) == keys[1]


def test_a_draft_model_has_a_key_of_its_own(base: EngineConfig) -> None:
    draft = DraftConfig(with_value(base, "model.hidden_size", 128).model, base.compile, base.graph)
    drafted = with_value(base, "speculation.draft", draft)
    assert cache_factors(drafted, ENVIRONMENT) == cache_factors(base, ENVIRONMENT)
    assert drafted.draft is not None
    assert drafted.draft == with_value(base, "model.hidden_size", 128)
    assert cache_factors(drafted.draft, ENVIRONMENT) != cache_factors(base, ENVIRONMENT)


def test_the_slots_of_adapters_change_the_key(base: EngineConfig) -> None:
    few = AdapterConfig(max_loras=2, max_lora_rank=16, max_cpu_loras=2)
    variants = (None, few, replace(few, max_loras=3), replace(few, max_lora_rank=8))
    keys = [str(cache_factors(with_value(base, "adapters", each), ENVIRONMENT)) for each in variants]
    assert len(set(keys)) == len(variants)
    more = with_value(base, "adapters", replace(few, max_cpu_loras=9))
    assert str(cache_factors(more, ENVIRONMENT)) == keys[1]


def test_what_the_forward_of_images_computes_changes_the_key(base: EngineConfig) -> None:
    described = describe_vision(vision_config("LlavaForConditionalGeneration"))
    assert described is not None
    images = ImagesConfig(described, "{}", most_embeddings=8, cache_size=16, step_size=16)
    leveled = replace(images, vision=replace(described, levels=1))
    variants = (None, images, replace(images, cache_size=32), leveled)
    keys = [str(cache_factors(with_value(base, "images", each), ENVIRONMENT)) for each in variants]
    assert len(set(keys)) == len(variants)
    assert any("passes/images" in name for name in cache_factors(with_value(base, "images", images))["source"])
    other = replace(images, config='{"a": 1}', step_size=8, most_embeddings=4)
    assert str(cache_factors(with_value(base, "images", other), ENVIRONMENT)) == keys[1]


def test_a_cache_in_the_dtype_of_the_model_is_no_factor(base: EngineConfig) -> None:
    assert "cache.kv_dtype" not in cache_factors(base, ENVIRONMENT)["config"]
    keys = {str(cache_factors(with_value(base, "cache.kv_dtype", name), ENVIRONMENT)) for name in ("auto", "int8")}
    assert len(keys) == 2


@cache
def base_with(architecture: str) -> tuple[EngineConfig, list[Any]]:
    config = with_value(base_config(), "model.architecture", architecture)
    return config, final_graph(config)


IN_THE_GRAPH = [field for field in PERTURBED if field not in OTHER_FIELDS]


@pytest.mark.parametrize("field", IN_THE_GRAPH)
def test_a_field_that_changes_the_graph_changes_the_key(field: str) -> None:
    base = with_value(base_config(), "model.architecture", architecture_with(field))
    assert cache_factors(perturbed(base, field), ENVIRONMENT) != cache_factors(base, ENVIRONMENT)


@pytest.mark.product(one_in=24)
@pytest.mark.parametrize("field", IN_THE_GRAPH)
def test_a_field_of_the_key_changes_the_graph(field: str) -> None:
    base, base_graph = base_with(architecture_with(field))
    assert differs(perturbed(base, field), base_graph)


@pytest.mark.parametrize("which", [0, 1])
def test_the_other_fields_change_neither(which: int, base: EngineConfig) -> None:
    """Of the key each alone, of the graph half of them together."""
    others = [field for field in PERTURBED if field in OTHER_FIELDS]
    config = base
    for field in others[which::2]:
        assert cache_factors(perturbed(base, field), ENVIRONMENT) == cache_factors(base, ENVIRONMENT), field
        config = perturbed(config, field)
    assert final_graph(config) == base_with(base.model.architecture)[1]


@pytest.mark.parametrize(
    "changes", [{"ignore": ("lm_head",)}, {"method": "fp8"}, {"rules": (Rule(("re:.*mlp",), "e4m3 1x*"),)}]
)
def test_the_rules_of_a_quantised_model_count(changes: dict[str, Any], base: EngineConfig) -> None:
    first, second = (
        with_value(base, "model.quantisation", replace(online("fp8", ()), **more)) for more in ({}, changes)
    )
    assert len({factors_key(cache_factors(config, ENVIRONMENT)) for config in (base, first, second)}) == 3


def test_how_positions_are_scaled_counts_only_where_the_graph_has_it(base: EngineConfig) -> None:
    """All but yarn change the rotary frequencies alone, which are an input."""
    plain = with_value(base, "model.rope", RopeConfig(10000.0))
    linear = with_value(base, "model.rope", RopeConfig(5e5, "linear", factor=4.0))
    assert cache_factors(linear, ENVIRONMENT) == cache_factors(plain, ENVIRONMENT) != cache_factors(base, ENVIRONMENT)
    assert final_graph(linear) == final_graph(plain)


def test_a_new_field_must_be_declared(base: EngineConfig) -> None:
    @dataclass(frozen=True)
    class Wider(EngineConfig):
        fast: bool

    wider = Wider(**{field.name: getattr(base, field.name) for field in fields(base)}, fast=True)
    with pytest.raises(RuntimeError, match="not declared as graph-affecting or not: fast"):
        graph_config(wider)


ENVIRONMENTS = [
    ({"versions": {"torch": "2.14.0", "cuda": None}}, "versions.torch: '2.13.0' here, '2.14.0' in ab12"),
    ({"versions": {"torch": "2.13.0", "cuda": "13.0"}}, "versions.cuda: not set here, '13.0' in ab12"),
    ({"device": {"type": "cpu", "instructions": ["avx2"]}}, "device.instructions: fma only here"),
    ({"device": {"type": "cpu", "instructions": ["avx2", "fma", "amx"]}}, "device.instructions: amx only in ab12"),
    ({"compiler": {"version": "g++ 13.1.0"}}, "compiler.version: 'g++ 12.2.0' here, 'g++ 13.1.0' in ab12"),
    (
        {"settings": {"inductor": {"cpp.dynamic_threads": False}, "environment": {}}},
        "inductor.cpp.dynamic_threads: True here, False in ab12",
    ),
    (
        {"settings": {"inductor": {"cpp.dynamic_threads": True}, "environment": {"TORCHINDUCTOR_FREEZING": "1"}}},
        "environment.TORCHINDUCTOR_FREEZING: not set here, '1' in ab12",
    ),
    (
        {"profile": {"noise_us": 2.0, "gains_us": {"silu_mul": {"8": -9.0}}}},
        "profile.gains_us.silu_mul.8: 1.5 here, -9.0 in ab12",
    ),
    (
        {"source": {"passes/linear/silu_mul.py": "cccc", "graphs/split.py": "bbbb"}},
        "source code: compiled_engine/passes/linear/silu_mul.py was changed",
    ),
    ({"source": {"passes/linear/silu_mul.py": "aaaa"}}, "source code: compiled_engine/graphs/split.py is only here"),
]


@pytest.mark.parametrize(("changed", "words"), ENVIRONMENTS)
def test_the_environment_is_part_of_the_key(base: EngineConfig, changed: dict[str, Any], words: str) -> None:
    ours, theirs = cache_factors(base, ENVIRONMENT), cache_factors(base, replace(ENVIRONMENT, **changed))
    assert factors_key(ours) != factors_key(theirs)
    assert [difference.in_words("here", "in ab12") for difference in differences(ours, theirs)] == [words]


def test_config_fields_are_told_apart_in_words(base: EngineConfig) -> None:
    other = replace(
        base,
        scheduler=replace(base.scheduler, max_num_batched_tokens=128),
        compile=replace(base.compile, passes=tuple(name for name in base.compile.passes if name != "silu_mul")),
    )
    found = differences(cache_factors(base, ENVIRONMENT), cache_factors(other, ENVIRONMENT))
    assert [difference.in_words("here", "in ab12") for difference in found] == [
        "compile.passes: silu_mul only here",
        "scheduler.max_num_batched_tokens: 256 here, 128 in ab12",
    ]
    assert differences(cache_factors(base, ENVIRONMENT), cache_factors(base, ENVIRONMENT)) == []


def test_a_pass_that_was_changed_is_named(base: EngineConfig) -> None:
    ours = cache_factors(base, ENVIRONMENT)
    theirs = ours | {"passes": ours["passes"] | {"silu_mul": "another"}}
    (found,) = differences(ours, theirs)
    assert found.in_words("here", "in ab12") == "pass silu_mul was changed"


def test_a_pass_that_is_not_run_does_not_count(base: EngineConfig) -> None:
    config = with_value(base, "compile.passes", ("merge_linears",))
    assert cache_factors(config, ENVIRONMENT)["passes"].keys() == {"merge_linears"}


FOREIGN = TransformersModel("5.0.0", "{}")


@pytest.mark.parametrize(
    ("field", "value", "packages"),
    [
        ("parallel.tensor_parallel_size", 2, RANK_PACKAGES),
        ("model.transformers", FOREIGN, ("models.foreign",)),
        ("model.recurrences", Recurrences((), 8), RECURRENCE_PACKAGES),
    ],
)
def test_code_that_only_some_models_run_counts_where_it_is_run(
    field: str, value: object, packages: tuple[str, ...], base: EngineConfig
) -> None:
    """That of shares, sums and the checkpoint's slices, of transformers' models, and of recurrences."""
    alone, files = cache_factors(base)["source"], cache_factors(with_value(base, field, value))["source"]
    folders = [f"{package.replace('.', '/')}/" for package in packages]
    added = files.keys() - alone.keys()
    assert added
    assert {folder for folder in folders if any(name.startswith(folder) for name in added)} == set(folders)
    assert all(name.startswith(tuple(folders)) for name in added)


@pytest.mark.parametrize("other", [{"version": "5.0.1"}, {"config": '{"hidden_size": 64}'}])
def test_the_version_of_transformers_and_its_configuration_count(other: dict[str, str], base: EngineConfig) -> None:
    one, another = (with_value(base, "model.transformers", each) for each in (FOREIGN, replace(FOREIGN, **other)))
    assert factors_key(cache_factors(one, ENVIRONMENT)) != factors_key(cache_factors(another, ENVIRONMENT))


def test_the_order_of_passes_counts(base: EngineConfig) -> None:
    turned = with_value(base, "compile.passes", base.compile.passes[::-1])
    assert cache_factors(turned, ENVIRONMENT) != cache_factors(base, ENVIRONMENT)
    (found,) = differences(cache_factors(base, ENVIRONMENT), cache_factors(turned, ENVIRONMENT))
    assert found.factor == "config.compile.passes"
