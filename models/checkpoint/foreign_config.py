"""Convert a config.json to the ModelConfig of a model that runs transformers' code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from compiled_engine.config import HeadShape, ModelConfig, Recurrences, RopeConfig, TransformersModel
from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.models.foreign.description import UnknownArchitectureError, transformers_version
from compiled_engine.models.foreign.find_description import find_description


def foreign_model(
    fields: JsonFields, path: Path, dtype: torch.dtype, cache_dir: Path | None, names: Sequence[str]
) -> tuple[ModelConfig, str]:
    """Return the model's configuration, and a text that names the source of its max_model_len.

    max_model_len is the longest length that the model supports. fields: the fields of config.json. path: the
    checkpoint's folder. cache_dir: see `find_description`. names: architectures to try in order; the first one that
    transformers knows is used. Raises UnknownArchitectureError if transformers knows none of them, and ValueError for a
    model that the engine cannot run.
    """
    name, *others = names
    config_json = json.dumps(fields.replaced(architectures=[name]).values, sort_keys=True)
    try:
        description = find_description(config_json, dtype, cache_dir)
    except UnknownArchitectureError:
        if others:
            return foreign_model(fields, path, dtype, cache_dir, others)
        raise
    except ValueError as error:
        raise ValueError(f"{fields.source}: {error}") from error
    if description.architecture != name:  # a decoder, which runs as a causal language model
        return foreign_model(fields, path, dtype, cache_dir, [description.architecture])
    layers = description.layers
    heads = tuple(
        HeadShape(
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            layer.latent_dim,
            layer.key_dim,
            layer.value_dim,
        )
        for layer in layers
    )
    kv_layers = tuple(number if layer.kv_layer is None else layer.kv_layer for number, layer in enumerate(layers))
    attending = [layer for layer in layers if layer.num_heads]
    first = attending[0]
    usual = next(each for each in heads if each.num_heads)
    if len({layer.soft_cap for layer in attending}) > 1:
        raise ValueError(f"{fields.source}: the layers of {description.architecture} differ in their soft_cap")
    length = description.max_position_embeddings
    model = ModelConfig(
        path=path,
        hub_name=None,
        revision=None,
        architecture=description.architecture,
        vocab_size=description.vocab_size,
        hidden_size=description.hidden_size,
        intermediate_size=description.intermediate_size,
        num_layers=len(layers),
        **asdict(usual),
        max_position_embeddings=length,
        rms_norm_eps=0.0,
        rope=RopeConfig(0.0),
        tie_word_embeddings=any(parameter.tied for parameter in description.parameters),
        qkv_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        sliding_windows=tuple(layer.sliding_window for layer in layers),
        dtype=dtype,
        max_model_len=length,
        load_format="safetensors",
        seed=0,
        transformers=TransformersModel(transformers_version(), config_json),
        layer_heads=heads if len(set(heads)) > 1 else None,
        kv_layers=None if kv_layers == tuple(range(len(layers))) else kv_layers,
        attention_soft_cap=first.soft_cap,
        attention_sinks=tuple(number for number, layer in enumerate(layers) if layer.sinks),
        linear_biases=any(layer.linear_bias for layer in layers),
        num_biases=first.num_biases,
        causal=first.causal,
        token_types=description.token_types,
        length_angles=description.length_angles,
        speech=description.speech,
        refused_id=description.padding_id,
        recurrences=Recurrences(description.states) if description.states else None,
    )
    return model, "the model's max_position_embeddings"
