"""Derive the configuration with which a vision tower runs from the configuration of the engine."""

from __future__ import annotations

from dataclasses import replace

from compiled_engine.attention.backend import choose_backend
from compiled_engine.attention.case import GraphSupport, cases_of
from compiled_engine.config import (
    EngineConfig,
    ExpertsConfig,
    GraphConfig,
    GraphMode,
    ModelConfig,
    SpeculationConfig,
    TransformersModel,
)
from compiled_engine.kv_format import AUTO
from compiled_engine.models.foreign.description import transformers_version
from compiled_engine.models.vision.padded_inputs import graph_sizes
from compiled_engine.passes.registry import passes_of_quantised, passes_of_ranks, step_tensors
from compiled_engine.passes.rope.rope_angles import RopeAngles
from compiled_engine.vision import VisionDescription

# Passes for rotary angles that are computed from a single position of each token.
_OF_POSITIONS = (RopeAngles.name,)


def tower_config(
    config: EngineConfig, description: VisionDescription, config_json: str, most_embeddings: int
) -> EngineConfig:
    """Return the configuration with which a vision tower runs. Each rank computes the whole tower.

    If the engine captures CUDA graphs and the attention backend allows it, a compiled tower has FULL graphs; their
    token_sizes count embeddings of grids, or tiles. An eager tower has no graphs, as transformers' code may wait for
    the device.

    config: the engine's configuration. config_json: text of the checkpoint's config.json. most_embeddings: the most
    embeddings of all images in a call; one tile is always allowed. Raises ValueError if no attention backend runs the
    tower.
    """
    most_tokens = description.most_tiles(most_embeddings) if description.tile_size else most_embeddings
    model = tower_model(config.model, description, config_json)
    without = {*_OF_POSITIONS, *passes_of_quantised(), *passes_of_ranks()}
    passes = tuple(name for name in config.compile.passes if name not in without and not step_tensors([name]))
    attention = choose_backend("auto", "auto", cases_of(model, config.cache.block_size, config.device))
    graph = GraphConfig(GraphMode.NONE)
    if config.graph.captures and config.compile.enabled and attention.support.graphs is GraphSupport.ALWAYS:
        graph = GraphConfig(GraphMode.FULL, token_sizes=graph_sizes(description, most_tokens))
    return replace(
        config,
        model=model,
        cache=replace(config.cache, kv_dtype=AUTO),
        scheduler=replace(config.scheduler, max_num_batched_tokens=most_tokens),
        compile=replace(config.compile, ranges=(), passes=passes),
        graph=graph,
        parallel=replace(config.parallel, tensor_parallel_size=1, stage_layers=()),
        attention_backend=attention.backend,
        speculation=SpeculationConfig(),
        adapters=None,
        images=None,
        image_input=None,
        speech=None,
    )


def tower_model(model: ModelConfig, description: VisionDescription, config_json: str) -> ModelConfig:
    """Return the ModelConfig of a vision tower, derived from that of the checkpoint's text model, `model`.

    config_json: text of the checkpoint's config.json.
    """
    return replace(
        model,
        architecture=f"{description.architecture}'s tower",
        hidden_size=description.row_size,
        num_layers=description.num_layers,
        num_heads=description.num_heads,
        num_kv_heads=description.num_heads,
        head_dim=description.head_dim,
        sliding_windows=(None,) * description.num_layers,
        transformers=TransformersModel(transformers_version(), config_json),
        layer_heads=None,
        attention_scale=None,
        attention_soft_cap=0.0,
        experts=ExpertsConfig(),
        quantisation=None,
        wrapper=None,
        pooling=None,
        causal=False,
        token_types=0,
        recurrences=None,
        merged_adapter=None,
        head=None,
        vision=description,
    )
