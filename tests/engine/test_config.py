"""The derived values of a resolved configuration."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_config import BASE, MODEL

from compiled_engine.config import (
    AdapterConfig,
    DraftConfig,
    EngineConfig,
    ExpertsConfig,
    GraphConfig,
    GraphMode,
    HeadConfig,
    HeadShape,
    ParallelConfig,
    Recurrences,
    RopeConfig,
    RowState,
    SpeculationConfig,
    TransformersModel,
    draft_lengths,
    flat_fields,
    json_value,
)
from compiled_engine.parallel.rank_share import local_model, local_share
from compiled_engine.processes.wire import decode_other, encode_other


def magnitude(mscale: float, factor: float) -> float:
    """The factor that YaRN gives the logits of attention, as its paper has it: its square root for each side."""
    return 0.1 * mscale * math.log(factor) + 1


def test_what_is_not_said_asks_for_nothing() -> None:
    """Neither a feature of a model nor anything beside the engine's plain work."""
    assert MODEL.experts == ExpertsConfig(0, 0, 0, False, ())
    assert (MODEL.attention_soft_cap, MODEL.logit_soft_cap, MODEL.attention_sinks) == (0.0, 0.0, ())
    assert (MODEL.causal, MODEL.token_types) == (True, 0)
    for name in ("transformers", "layer_heads", "attention_scale", "local_rope_theta", "quantisation", "wrapper"):
        assert getattr(MODEL, name) is None, name
    for name in ("pooling", "recurrences", "merged_adapter", "head"):
        assert getattr(MODEL, name) is None, name
    assert HeadConfig(64, 3, 101) == HeadConfig(64, 3, 101, norm_before_residual=False, norm_before_fc=False)
    assert Recurrences(()) == Recurrences((), num_rows=0, num_snapshots=0)
    assert ParallelConfig(1, "in_process") == ParallelConfig(1, "in_process", 1, (), "auto")
    assert BASE.cache.kv_dtype == "auto"
    assert (BASE.scheduler.async_scheduling, BASE.scheduler.max_prefill_tokens) == (False, None)
    assert SpeculationConfig() == SpeculationConfig("none", 0, 0, 0, None, (), (), False, False, (1.0,))
    plain = RopeConfig(1e4)
    assert (plain.kind, plain.factor, plain.original_max_position_embeddings) == ("default", 1.0, None)


def test_the_bounds_of_scaled_angles_are_those_of_their_papers() -> None:
    """These are the defaults of checkpoints that state none: llama3's wave lengths, and YaRN's numbers of rotations."""
    rope = RopeConfig(1e4)
    assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0)
    assert (rope.beta_fast, rope.beta_slow, rope.truncate) == (32.0, 1.0, True)
    assert (rope.attention_factor, rope.mscale, rope.mscale_all_dim) == (None, None, None)


@pytest.mark.parametrize(
    ("rope", "scale"),
    [
        (RopeConfig(1e4, "llama3", factor=8.0, attention_factor=2.0), 1.0),
        (RopeConfig(1e4, "yarn", factor=8.0), magnitude(1.0, 8.0)),
        (RopeConfig(1e4, "yarn", factor=1.0), 1.0),
        (RopeConfig(1e4, "yarn", factor=0.5), 1.0),
        (RopeConfig(1e4, "yarn", factor=8.0, attention_factor=2.0, mscale=1.0, mscale_all_dim=0.5), 2.0),
        (RopeConfig(1e4, "yarn", factor=8.0, mscale=0.7, mscale_all_dim=0.5), magnitude(0.7, 8) / magnitude(0.5, 8)),
        (RopeConfig(1e4, "yarn", factor=8.0, mscale=0.7), magnitude(1.0, 8.0)),
        (RopeConfig(1e4, "yarn", factor=8.0, mscale_all_dim=0.7), magnitude(1.0, 8.0)),
    ],
    ids=str,
)
def test_the_scale_of_angles(rope: RopeConfig, scale: float) -> None:
    assert rope.angle_scale == pytest.approx(scale)


@pytest.mark.parametrize(
    ("parallel", "stages", "devices", "replicas"),
    [
        (ParallelConfig(1, "in_process"), 1, 1, False),
        (ParallelConfig(3, "multiprocess"), 1, 3, False),
        (ParallelConfig(3, "multiprocess", stage_layers=(4, 5)), 2, 6, False),
        (ParallelConfig(3, "multiprocess", 2, (4, 5)), 2, 6, True),
        (ParallelConfig(1, "ray"), 1, 1, True),
    ],
)
def test_ranks_stages_and_replicas(parallel: ParallelConfig, stages: int, devices: int, replicas: bool) -> None:
    assert (parallel.num_stages, parallel.devices_per_replica, parallel.has_replicas) == (stages, devices, replicas)
    config = replace(BASE, parallel=parallel, scheduler=replace(BASE.scheduler, max_num_seqs=5))
    assert config.max_running == 5 * stages
    for ahead in (False, True):
        scheduler = replace(config.scheduler, async_scheduling=ahead)
        assert replace(config, scheduler=scheduler).steps_in_flight == stages + ahead


@pytest.mark.parametrize(
    ("parallel", "executor"),
    [
        (ParallelConfig(1, "ray", 4), "in_process"),
        (ParallelConfig(2, "ray", 4), "multiprocess"),
        (ParallelConfig(1, "ray", 4, (1, 1)), "multiprocess"),
        (ParallelConfig(1, "multiprocess", 4), "multiprocess"),
        (ParallelConfig(1, "in_process", 4), "in_process"),
    ],
)
def test_a_replica_has_the_same_but_is_alone(parallel: ParallelConfig, executor: str) -> None:
    config = replace(BASE, parallel=parallel)
    of_replica = config.of_replica(0)
    assert of_replica.parallel == replace(parallel, executor=executor, data_parallel_size=1)
    assert replace(of_replica, parallel=parallel) == config


def test_states_of_recurrences() -> None:
    states = (RowState("a", (6, 5), "float32"), RowState("b", (4, 3, 2), "bfloat16"))
    assert [state.row_bytes for state in states] == [6 * 5 * 4, 4 * 3 * 2 * 2]
    recurrences = Recurrences(states, num_rows=7, num_snapshots=8)
    assert recurrences.row_bytes == 120 + 48
    halves = (RowState("a", (3, 5), "float32"), RowState("b", (2, 3, 2), "bfloat16"))
    share = local_share(replace(MODEL, recurrences=recurrences), 2)
    assert share.recurrences == Recurrences(halves, num_rows=7, num_snapshots=8)


def test_layers_and_their_heads() -> None:
    model = MODEL
    assert model.num_mlps == model.num_layers == 2
    with_experts = replace(model, experts=ExpertsConfig(4, 2, 32, dense_layers=(1,)))
    assert with_experts.num_mlps == 1
    assert replace(with_experts, experts=ExpertsConfig(4, 2, 32)).num_mlps == 0
    own = (HeadShape(4, 2, 16), HeadShape(8, 1, 32))
    assert [model.heads_of(layer) for layer in range(2)] == [HeadShape(4, 2, 16)] * 2
    differing = replace(model, layer_heads=own)
    assert [differing.heads_of(layer) for layer in range(2)] == [*own]
    assert differing.kv_shapes(9, 4) == [(9, 2, 4, 2, 16), (9, 2, 4, 1, 32)]
    # A scale of an int8 head takes as much as two of its elements.
    assert differing.kv_shapes(9, 4, torch.uint8) == [(9, 2, 4, 2, 18), (9, 2, 4, 1, 34)]
    assert replace(differing, causal=False).kv_shapes(9, 4) == []


def test_the_origin_of_the_code() -> None:
    assert MODEL.implementation == "textbook"
    assert replace(MODEL, transformers=TransformersModel("5", "{}")).implementation == "transformers"


@pytest.mark.parametrize(
    ("mode", "decodes", "mixed"),
    [
        ("none", False, False),
        ("piecewise", False, True),
        ("full", True, True),
        ("full_decode_only", True, False),
        ("full_and_piecewise", True, True),
        ("breakable", False, True),
        ("recorded", False, False),
    ],
)
def test_the_batches_that_a_graph_mode_captures(mode: str, decodes: bool, mixed: bool) -> None:
    assert (GraphMode(mode).captures_decodes, GraphMode(mode).captures_mixed) == (decodes, mixed)


def test_a_graph_of_any_size_is_to_be_captured() -> None:
    mode = GraphMode.FULL
    sizes = GraphConfig(mode), GraphConfig(mode, (1,)), GraphConfig(mode, (), (1,)), GraphConfig(mode, (1,), (1,))
    assert [graph.captures for graph in sizes] == [False, True, True, True]


@given(most=st.integers(0, 300))
def test_numbers_of_drafts_are_halves(most: int) -> None:
    lengths = [most]
    while lengths[-1]:
        lengths.append(lengths[-1] // 2)
    assert draft_lengths(most) == tuple(reversed(lengths))


def draft(sizes: tuple[int, ...] = (1, 4)) -> DraftConfig:
    other = replace(MODEL, hidden_size=32)
    return DraftConfig(other, replace(BASE.compile, strict=True), GraphConfig(GraphMode.FULL, sizes))


@pytest.mark.parametrize(
    ("speculation", "lengths", "query_lens"),
    [
        (SpeculationConfig(), (0,), (1,)),
        (SpeculationConfig("ngram", 5), (5,), (1, 6)),
        (SpeculationConfig("ngram", 5, adapts=True), (0, 1, 2, 5), (1, 2, 3, 6)),
    ],
)
def test_rows_of_steps_with_drafts(
    speculation: SpeculationConfig, lengths: tuple[int, ...], query_lens: tuple[int, ...]
) -> None:
    assert (speculation.lengths, speculation.query_lens) == (lengths, query_lens)
    assert speculation.verified == query_lens[1:]
    config = replace(BASE, speculation=speculation)
    assert (config.speculation.lengths, config.max_new_tokens_per_step) == (lengths, query_lens[-1])


@pytest.mark.parametrize("adapts", [False, True])
@pytest.mark.parametrize("aux_layers", [(), (1, 2)])
@pytest.mark.parametrize("has_draft", [False, True])
def test_a_head_rests_where_the_number_of_drafts_is_chosen(
    adapts: bool, aux_layers: tuple[int, ...], has_draft: bool
) -> None:
    speculation = SpeculationConfig(
        "eagle3", 3, draft=draft() if has_draft else None, aux_layers=aux_layers, adapts=adapts
    )
    assert speculation.skips_head == (adapts and aux_layers != ())
    assert speculation.sizes_read == ((1, 4) if adapts and aux_layers and has_draft else None)


def test_the_draft_model_has_the_settings_of_the_engine_but_its_own() -> None:
    assert BASE.draft is None
    with_draft = replace(
        BASE, speculation=SpeculationConfig("draft_model", 3, draft=draft()), adapters=AdapterConfig(1, 2, 3)
    )
    found = with_draft.draft
    assert found is not None
    changed = {"model", "compile", "graph", "speculation", "adapters"}
    for field in fields(EngineConfig):
        if field.name not in changed:
            assert getattr(found, field.name) is getattr(with_draft, field.name)
    assert (found.model, found.compile, found.graph) == (draft().model, draft().compile, draft().graph)
    assert found.speculation == SpeculationConfig()
    assert found.adapters is None


@pytest.mark.parametrize(("kv_dtype", "dtype"), [("auto", torch.float16), ("int8", torch.uint8)])
def test_the_dtype_of_the_cache(kv_dtype: str, dtype: torch.dtype) -> None:
    model, cache = replace(MODEL, dtype=torch.float16), replace(BASE.cache, kv_dtype=kv_dtype)
    assert replace(BASE, model=model, cache=cache).cache_dtype is dtype


CONFIG_JSON: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "pad_token_id": 5,
    "hidden_size": 64,
    "vocab_size": 100,
}


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("vocab_size", [100, 104])
def test_the_share_of_a_rank(num_ranks: int, vocab_size: int) -> None:
    """Undivided values stay equal. If there are more ranks than K/V heads, each rank has one."""
    whole = replace(
        MODEL,
        num_heads=8,
        num_kv_heads=4,
        layer_heads=(HeadShape(8, 4, 16), HeadShape(16, 2, 8)),
        vocab_size=vocab_size,
        experts=ExpertsConfig(4, 2, 32, dense_layers=(0,)),
        recurrences=Recurrences((RowState("a", (8, 3, 2), "float32", num_groups=4),)),
        transformers=TransformersModel("5", json.dumps(CONFIG_JSON)),
    )
    share = local_share(whole, num_ranks)
    vocab_share = vocab_size // num_ranks if vocab_size % num_ranks == 0 else vocab_size
    divided = {
        "num_heads": 8 // num_ranks,
        "num_kv_heads": max(1, 4 // num_ranks),
        "layer_heads": (
            HeadShape(8 // num_ranks, max(1, 4 // num_ranks), 16),
            HeadShape(16 // num_ranks, max(1, 2 // num_ranks), 8),
        ),
        "vocab_size": vocab_share,
        "intermediate_size": 96 // num_ranks,
        "experts": ExpertsConfig(4, 2, 32 // num_ranks, dense_layers=(0,)),
        "recurrences": Recurrences(
            (RowState("a", (8 // num_ranks, 3, 2), "float32", num_groups=max(1, 4 // num_ranks)),)
        ),
    }
    for field in fields(whole):
        if field.name != "transformers":
            assert getattr(share, field.name) == divided.get(field.name, getattr(whole, field.name)), field.name
    assert share.transformers is not None
    foreign = json.loads(share.transformers.config)
    if num_ranks == 1:
        assert foreign == CONFIG_JSON
        return
    assert foreign == {
        "num_attention_heads": 8 // num_ranks,
        "num_key_value_heads": max(1, 4 // num_ranks),
        "head_dim": 16,
        "intermediate_size": 96 // num_ranks,
        "moe_intermediate_size": 48 // num_ranks,
        "shared_expert_intermediate_size": 64 // num_ranks,
        "linear_num_key_heads": max(1, 4 // num_ranks),
        "linear_num_value_heads": 8 // num_ranks,
        "pad_token_id": None,
        "hidden_size": 64,
        "vocab_size": vocab_share,
    }
    config = replace(BASE, model=whole, parallel=ParallelConfig(num_ranks, "multiprocess"))
    assert local_model(config) == share


@pytest.mark.parametrize(
    ("given", "model", "name", "divided"),
    [
        (
            {"per_layer_config": {"1": {"head_dim": 64, "num_key_value_heads": 2, "intermediate_size": 8}}},
            {},
            "per_layer_config",
            {"1": {"head_dim": 64, "num_key_value_heads": 1, "intermediate_size": 4}},
        ),
        ({"qk_rope_head_dim": 8}, {"latent_dim": 32, "key_dim": 24, "value_dim": 16}, "v_head_dim", 16),
    ],
)
def test_a_share_states_what_transformers_would_derive(
    given: dict[str, Any], model: dict[str, int], name: str, divided: Any
) -> None:
    """Sizes of layers that transformers states for each, and of values that it derives from the number of heads."""
    whole = replace(MODEL, transformers=TransformersModel("5", json.dumps(given)), **model)
    found = local_share(whole, 2).transformers
    assert found is not None
    assert json.loads(found.config)[name] == divided


def test_a_share_has_nothing_that_the_whole_has_not() -> None:
    share = local_share(MODEL, 2)
    assert (share.layer_heads, share.recurrences, share.transformers) == (None, None, None)
    config = json.dumps({"num_key_value_heads": None})
    foreign = replace(MODEL, num_kv_heads=MODEL.num_heads, transformers=TransformersModel("5", config))
    found = local_share(foreign, 2).transformers
    assert found is not None
    assert json.loads(found.config)["num_key_value_heads"] is None


@dataclass(frozen=True)
class Inner:
    folder: Path
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Outer:
    inner: Inner
    mode: GraphMode
    dtype: torch.dtype
    by_name: dict[str, Any]
    nothing: None = None


def test_configurations_as_json() -> None:
    outer = Outer(Inner(Path("/a/torch.b"), (1, 2)), GraphMode.FULL, torch.bfloat16, {"x": [Path("c"), 1.5, True, "y"]})
    inner = {"folder": "/a/torch.b", "sizes": [1, 2]}
    plain = {"mode": "full", "dtype": "bfloat16", "by_name": {"x": ["c", 1.5, True, "y"]}, "nothing": None}
    assert json_value(outer) == {"inner": inner, **plain}
    assert json.loads(json.dumps(json_value(outer))) == json_value(outer)
    assert flat_fields(outer) == {f"inner.{name}": value for name, value in inner.items()} | plain


@pytest.mark.parametrize(
    ("value", "text"),
    [(Path("/a/b"), "/a/b"), (torch.device("cuda", 1), "cuda:1"), (torch.float8_e4m3fn, "float8_e4m3fn")],
)
def test_values_in_messages(value: Any, text: str) -> None:
    assert encode_other(value) == text
    kind = Path if isinstance(value, Path) else type(value)
    assert decode_other(kind, text) == value


def test_what_no_message_holds() -> None:
    with pytest.raises(TypeError, match="no message holds a complex"):
        encode_other(1j)
    with pytest.raises(TypeError, match="no message holds a complex"):
        decode_other(complex, "1j")
