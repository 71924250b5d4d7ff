"""Factors of what only some models and engines have, field by field."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
from tiny_models import tiny_config

from compiled_engine.config import (
    AdapterConfig,
    EngineConfig,
    HeadConfig,
    LengthAngles,
    Recurrences,
    RowState,
)
from compiled_engine.graphs.cache.entry import factors_key
from compiled_engine.graphs.cache.environment import Environment
from compiled_engine.graphs.cache.key import cache_factors
from compiled_engine.pooling import Dense, Pooling
from compiled_engine.quantisation import Rule, StoredWeight, online
from compiled_engine.speech import MelSettings, SpeechConfig, SpeechDescription, SpeechRules
from compiled_engine.vision import VisionDescription

ENVIRONMENT = Environment({}, {}, {}, {}, {}, {})
SPEECH_RULES = SpeechRules(1, 9, 2, 448, {"en": 3}, {"transcribe": 4}, (5,), (6,), 7, 50)
# What a model or an engine may have, with another value for each field: first those that shape a graph.
OPTIONAL: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "model.quantisation": (
        online("fp8", ()),
        {
            "method": "fp8",
            "rules": (Rule(("re:.*mlp",), "e4m3 1x*"),),
            "ignore": ("lm_head",),
            "scale_name": "weight_scale_inv",
            "layout": "gptq",
            "stored": (StoredWeight("model.layers.0.mlp.experts.down_proj", "int4 1x32", ""),),
        },
        {},
    ),
    "model.pooling": (
        Pooling("embed", ("lasttoken",), (), "normalise"),
        {"head": (Dense("2_Dense", 64, 8),)},
        {
            "task": "classify",
            "kinds": ("mean",),
            "activation": "none",
            "labels": ("yes", "no"),
            "template": ("a", "b", "c"),
            "prompts": (("query", "find: "),),
            "include_prompt": False,
            "lower_case": True,
            "dimensions": 8,
            "activates": False,
            "own_head": True,
        },
    ),
    "model.recurrences": (
        Recurrences((RowState("conv", (4, 3), "float32"),), 8, 2),
        {"states": (RowState("conv", (4, 2), "float32"),), "num_rows": 9, "num_snapshots": 3, "num_drafts": 2},
        {},
    ),
    "model.length_angles": (LengthAngles(64, True), {"border": 128, "recomputes": False}, {}),
    "model.head": (
        HeadConfig(64, 3, 100),
        {
            "target_size": 128,
            "num_aux_layers": 2,
            "vocab_size": 50,
            "norm_before_residual": True,
            "norm_before_fc": True,
            "hidden_first": True,
            "shares_norm": True,
        },
        {},
    ),
    "model.vision": (
        VisionDescription("A", "a", 1, 64, 4, 2, 4, 16),
        {
            **{"architecture": "B", "family": "b", "image_token_id": 2, "embedding_size": 32, "patch_size": 8},
            **{"num_layers": 3, "num_heads": 2, "head_dim": 8, "num_channels": 1, "levels": 1, "both_ways": True},
            **{"mrope_section": (2, 3, 3), "mrope_interleaved": True, "temporal_patch_size": 2, "merge_size": 2},
            **{"window_size": 16, "table_side": 6, "tile_size": 24, "tile_patches": 36, "tile_embeddings": 9},
            "resolutions": ((24, 48),),
            **{"stated_positions": True, "both_ways_in_windows": True, "most_rows": 10, "layer_token_id": 0},
        },
        {},
    ),
    "model.speech": (
        SpeechDescription(80, 3000, 1500, 6, 64),
        {"num_mel_bins": 128, "num_frames": 200, "length": 100, "num_heads": 3, "head_dim": 32},
        {},
    ),
    "speech": (
        SpeechConfig(num_slots=4, step_clips=2, encoder_backend="torch", num_workers=1, cache_bytes=0),
        {"num_slots": 5, "step_clips": 1, "encoder_backend": "cpp"},
        {"num_workers": 2, "cache_bytes": 9, "rules": SPEECH_RULES, "mel": MelSettings(16_000, 480_000, 400, 160)},
    ),
    "adapters": (
        AdapterConfig(max_loras=2, max_lora_rank=16, max_cpu_loras=2),
        {"max_loras": 3, "max_lora_rank": 8},
        {"max_cpu_loras": 9},
    ),
}


def with_value(config: EngineConfig, path: str, value: Any) -> EngineConfig:
    if path.startswith("model."):
        return replace(config, model=replace(config.model, **{path.removeprefix("model."): value}))
    return replace(config, **{path: value})


def key_of(path: str, value: Any) -> str:
    return factors_key(cache_factors(with_value(tiny_config(num_layers=1), path, value), ENVIRONMENT))


def cases() -> Iterator[Any]:
    for path, (_, shaping, others) in OPTIONAL.items():
        yield from (pytest.param(path, field, True, id=f"{path}.{field}") for field in shaping)
        yield from (pytest.param(path, field, False, id=f"{path}.{field}") for field in others)


@pytest.mark.parametrize("path", OPTIONAL)
def test_what_a_model_has_counts_and_each_of_its_fields_is_tried(path: str) -> None:
    value, shaping, others = OPTIONAL[path]
    assert {field.name for field in fields(value)} == shaping.keys() | others.keys()
    assert key_of(path, value) != key_of(path, None)


@pytest.mark.parametrize(("path", "field", "counts"), list(cases()))
def test_a_field_counts_if_it_shapes_a_graph(path: str, field: str, counts: bool) -> None:
    value, shaping, others = OPTIONAL[path]
    other = replace(value, **{field: (shaping | others)[field]})
    assert getattr(other, field) != getattr(value, field)
    assert (key_of(path, other) != key_of(path, value)) is counts


def test_ranks_have_the_pass_that_shares_work_among_them_before_all_others() -> None:
    config = tiny_config(num_layers=1)
    shared = replace(config, parallel=replace(config.parallel, tensor_parallel_size=2))
    alone, of_ranks = (list(cache_factors(each, ENVIRONMENT)["passes"]) for each in (config, shared))
    assert of_ranks == ["tensor_parallel", *alone]
    assert set(alone) == set(config.compile.passes)


def test_the_callers_environment_is_taken_as_it_is() -> None:
    sections = ("versions", "device", "compiler", "settings", "profile", "source")
    environment = Environment(*({section: "given"} for section in sections))
    factors = cache_factors(tiny_config(num_layers=1), environment)
    assert {section: factors[section] for section in sections} == {name: {name: "given"} for name in sections}
    assert factors.keys() == {"config", "passes", *sections}
