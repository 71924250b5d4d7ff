"""Tiny models as plans and pieces that run at once, and a prompt for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from pass_cases import CPU, Family
from tiny_models import tiny_config

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.config import EngineConfig
from compiled_engine.graphs.compiler.build import apply_passes
from compiled_engine.graphs.compiler.plan import Plan
from compiled_engine.graphs.compiler.signature import forward_signature
from compiled_engine.graphs.compiler.split import make_plan, split
from compiled_engine.graphs.compiler.trace import TracedGraph, trace, without_storage
from compiled_engine.models.textbook.architectures import build_model
from compiled_engine.parallel.rank_share import local_model
from compiled_engine.passes.framework.graph_pass import CompileRange
from compiled_engine.passes.framework.manager import run_passes
from compiled_engine.passes.registry import registered_passes

NUM_LAYERS, NUM_TOKENS = 4, 5
Pieces = Mapping[str, Callable[..., object]]


def config_of(family: Family) -> EngineConfig:
    return tiny_config(
        family.architecture,
        NUM_LAYERS,
        rope=family.rope,
        tie_word_embeddings=family.tied,
        qkv_bias=family.qkv_bias,
        attention_out_bias=family.other_biases,
        mlp_bias=family.other_biases,
        sliding_windows=(family.sliding_window,) * NUM_LAYERS,
    )


_TRACES: dict[str, TracedGraph] = {}


def traced(config: EngineConfig) -> TracedGraph:
    """Return the traced graph of a configuration's model; equal configurations share a trace."""
    key = repr(config)
    if key not in _TRACES:
        _TRACES[key] = trace(without_storage(build_model(local_model(config)), CPU), forward_signature(config))
    return _TRACES[key]


def planned(config: EngineConfig, compile_range: CompileRange, *, fused: bool = False) -> tuple[Plan, Pieces]:
    """Return the plan of a model and its pieces, uncompiled. fused: keep the ops that passes insert, as on a GPU."""
    graphs = traced(config)
    if fused:
        module, passes = graphs.for_range(compile_range), registered_passes()
        run_passes(module.graph, passes, [graph_pass.name for graph_pass in passes], compile_range, CPU)
    else:
        module, _ = apply_passes(config, graphs, compile_range)
    steps = split(module.graph)
    plan, _ = make_plan(module.graph, steps)
    keys = [step.piece for step in plan.steps]
    return Plan.from_json(plan.to_json()), {
        key: step.piece for key, step in zip(keys, steps, strict=True) if key is not None and step.piece is not None
    }


def inputs() -> tuple[torch.Tensor, torch.Tensor, AttentionInputs]:
    """Return the inputs of a step with one prompt, whose keys and values are in block 0."""
    tokens = torch.arange(NUM_TOKENS)
    prompt = AttentionInputs(
        query_start_loc_R1=torch.tensor([0, NUM_TOKENS], dtype=torch.int32),
        seq_lens_R=torch.tensor([NUM_TOKENS], dtype=torch.int32),
        block_table_RB=torch.zeros(1, 1, dtype=torch.int32),
        slot_mapping_T=tokens,
        host_3=torch.tensor([0, NUM_TOKENS, NUM_TOKENS], dtype=torch.int32),
        backend="torch",
        work_W=torch.zeros(1, dtype=torch.int32),
    )
    return tokens * 7 % 50, tokens, prompt
