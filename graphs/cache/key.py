"""Collects the factors of the cache key, which decide whether a compiled model can be reused.

Every config field must be in one of the lists below, which say whether it is a factor. A field in no list is an error,
so that new fields cannot be forgotten.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from compiled_engine.config import BlockFilesConfig, EngineConfig, ImageInput, KVEventsConfig, flat_fields
from compiled_engine.graphs.cache.environment import Environment, digests_of, this_environment
from compiled_engine.kv_format import AUTO
from compiled_engine.passes.framework.manager import pass_uuid
from compiled_engine.passes.parallel.tensor_parallel import TensorParallel
from compiled_engine.passes.registry import registered_passes, step_tensors
from compiled_engine.speech import MelSettings, SpeechDescription, SpeechRules
from compiled_engine.vision import VisionDescription

# Fields that can change the pieces, their plan or their ranges.
GRAPH_FIELDS = (
    "model.architecture",
    "model.vocab_size",
    "model.hidden_size",
    "model.intermediate_size",
    "model.num_layers",
    "model.num_heads",
    "model.num_kv_heads",
    "model.head_dim",
    "model.rms_norm_eps",
    "model.qkv_bias",
    "model.attention_out_bias",
    "model.mlp_bias",
    "model.sliding_windows",
    "model.layer_heads",
    "model.latent_dim",
    "model.key_dim",
    "model.value_dim",
    "model.attention_scale",
    "model.attention_soft_cap",
    "model.logit_soft_cap",
    "model.experts.count",
    "model.experts.per_token",
    "model.experts.intermediate_size",
    "model.experts.renormalise",
    "model.experts.dense_layers",
    "model.dtype",
    "scheduler.max_num_batched_tokens",
    "compile.passes",
    "compile.ranges",
    "parallel.tensor_parallel_size",
    "attention_backend",
    "batch_invariant",
)
# Prefixes of fields that select many kernels, although they need not be factors of the key. Sizes of batches and
# contexts are left out, as they select few.
KERNEL_FIELDS = ("speculation.", "attention_backend", "cache.block_size", "cache.kv_dtype")
# Packages that define ranks' shares of parameters and checkpoints, and collectives.
RANK_PACKAGES = ("parallel", "models.checkpoint")
RECURRENCE_PACKAGES = ("recurrence",)
# Fields of a model with transformers' code.
FOREIGN_FIELDS = ("model.transformers.version", "model.transformers.config")
# Fields of a quantised model.
QUANTISED_FIELDS = tuple(
    f"model.quantisation.{name}" for name in ("method", "rules", "ignore", "scale_name", "layout", "stored")
)
# Fields of a model that pools: its head, and those used outside the graph.
POOLING_FIELDS = ("model.pooling.head",)
OTHER_POOLING_FIELDS = tuple(
    f"model.pooling.{name}"
    for name in (
        *("task", "kinds", "activation", "labels", "template", "prompts", "include_prompt", "lower_case", "dimensions"),
        "activates",
        "own_head",  # follows from model.architecture
    )
)
# Fields of a model with recurrences.
RECURRENCE_FIELDS = tuple(f"model.recurrences.{name}" for name in ("states", "num_rows", "num_snapshots", "num_drafts"))
# Fields of a model whose rotary angles depend on a request's length, and those that its graph then has as constants.
LENGTH_ANGLES_FIELDS = ("model.length_angles.border", "model.length_angles.recomputes")
ANGLE_CONSTANTS = ("model.rope.kind", "model.rope.theta", "model.rope.factor")
# Fields of a draft head.
HEAD_FIELDS = tuple(
    f"model.head.{name}"
    for name in (
        *("target_size", "num_aux_layers", "vocab_size"),
        *("norm_before_residual", "norm_before_fc", "hidden_first", "shares_norm"),
    )
)
# Fields of a vision tower, whose graph follows from them and from model.transformers.config.
VISION_FIELDS = tuple(f"model.vision.{field.name}" for field in fields(VisionDescription))
# Fields of a speech model, and of its engine.
SPEECH_FIELDS = (
    *(f"model.speech.{field.name}" for field in fields(SpeechDescription)),
    *(f"speech.{name}" for name in ("num_slots", "step_clips", "encoder_backend")),
)
OTHER_SPEECH_FIELDS = (
    *("speech.num_workers", "speech.cache_bytes", "speech.rules", "speech.mel"),
    *(f"speech.rules.{field.name}" for field in fields(SpeechRules)),
    *(f"speech.mel.{field.name}" for field in fields(MelSettings)),  # computed before the encoder's graph
)
SPEECH_PACKAGES = ("passes.speech",)
# Fields of an engine with adapters: the shapes of their slots.
ADAPTER_FIELDS = ("adapters.max_loras", "adapters.max_lora_rank")
OTHER_ADAPTER_FIELDS = ("adapters.max_cpu_loras",)
# Fields of an engine with images.
_OF_TEXT = ("levels", "mrope_section", "mrope_interleaved", "both_ways", "both_ways_in_windows", "layer_token_id")
IMAGE_FIELDS = ("images.cache_size", *(f"images.vision.{name}" for name in _OF_TEXT))
OTHER_IMAGE_FIELDS = (
    *(f"images.{name}" for name in ("config", "most_embeddings", "step_size")),
    *(f"images.vision.{field.name}" for field in fields(VisionDescription) if field.name not in _OF_TEXT),
)
IMAGE_PACKAGES = ("passes.images",)
# Fields of an engine that reads images.
OTHER_INPUT_FIELDS = tuple(f"image_input.{field.name}" for field in fields(ImageInput))
# Fields of an engine that publishes events of the prefix cache.
OTHER_EVENT_FIELDS = tuple(f"kv_events.{field.name}" for field in fields(KVEventsConfig))
# Fields of an engine that writes blocks to files.
OTHER_BLOCK_FILE_FIELDS = tuple(f"cache.block_files.{field.name}" for field in fields(BlockFilesConfig))
# Further outputs, for a draft head: inputs of layers, and hidden states beside logits; factors only if there are any.
FOR_HEADS = ("speculation.aux_layers", "speculation.reads_hidden")
# An 8-bit KV cache has other shapes, and scales; a factor only if it is not in the model's dtype.
CACHE_FORMAT = "cache.kv_dtype"
# Fields that matter only through model.rope.angle_scale, a constant in the graph.
ANGLE_SCALE_FIELDS = (
    "model.rope.kind",
    "model.rope.factor",
    "model.rope.attention_factor",
    "model.rope.mscale",
    "model.rope.mscale_all_dim",
)
# Fields that change nothing compiled: rotary frequencies and tied weights, for instance, are inputs of the graph. The
# device is a separate factor.
OTHER_FIELDS = (
    "sleeps",
    "logprobs_mode",
    "model.path",
    "model.hub_name",
    "model.revision",
    "model.wrapper",
    "model.overrides",  # of config.json, whose values are the other fields
    "model.rope.theta",
    "model.rope.original_max_position_embeddings",
    "model.rope.low_freq_factor",
    "model.rope.high_freq_factor",
    "model.rope.beta_fast",
    "model.rope.beta_slow",
    "model.rope.truncate",
    "model.rope.short_factor",
    "model.rope.long_factor",
    "model.attention_sinks",
    "model.linear_biases",  # these two follow from model.transformers.config
    "model.num_biases",
    "model.local_rope_theta",
    "model.tie_word_embeddings",
    "model.max_position_embeddings",
    "model.max_model_len",
    "model.load_format",
    "model.seed",
    "model.merged_adapter",
    "model.transformers",  # None, for the textbook's models
    "model.quantisation",  # None, for weights in model.dtype
    "model.pooling",  # None, for models that generate
    "model.kv_layers",  # follows from model.transformers.config
    "model.causal",  # these two follow from model.transformers.config, and from the head
    "model.token_types",
    "model.refused_id",
    "model.length_angles",  # None, for angles that depend on positions alone
    "model.recurrences",  # None, for models of attention alone
    "model.head",  # None, for all but heads that draft
    "model.vision",  # None, for all but vision towers
    "model.speech",  # these two are None, for all but speech models
    "speech",
    "tokenizer",
    "cache.block_size",
    "cache.num_blocks",
    "cache.gpu_memory_utilization",
    "cache.enable_prefix_caching",
    "cache.host_blocks",
    "cache.host_states",
    "cache.block_files",  # None, for an engine that writes no files
    "scheduler.max_num_seqs",
    "scheduler.max_model_len",
    "scheduler.policy",
    "scheduler.max_prefill_tokens",
    "scheduler.async_scheduling",
    "compile.enabled",
    "compile.strict",
    "compile.verify",
    "compile.workers",
    "compile.cache_dir",
    "compile.plugins",  # their passes are factors
    "graph.mode",
    "graph.decode_sizes",
    "graph.token_sizes",
    "graph.short_decodes",
    "graph.short_verified",
    "parallel.collectives",
    "parallel.executor",
    "parallel.stage_layers",
    "parallel.data_parallel_size",
    "device",
    "reasons",
    "speculation.method",
    "speculation.num_tokens",
    "speculation.lookup_max",
    "speculation.lookup_min",
    "speculation.draft",  # a draft model has an entry of its own
    "speculation.acceptance_rates",
    "speculation.adapts",
    "speculation.sharpnesses",
    "adapters",  # None, for an engine without them
    "images",  # None, for an engine without them
    "image_input",  # None, for an engine that reads no images
    "kv_events",  # None, for an engine that publishes none
)


def cache_factors(config: EngineConfig, environment: Environment | None = None) -> dict[str, Any]:
    """Return all factors of the cache key, as a nested dict of JSON values.

    environment: the factors besides the config; None: those of this process, for the config's device.
    """
    environment = this_environment(config.device) if environment is None else environment
    passes = {p.name: pass_uuid(p) for p in registered_passes() if p.name in config.compile.passes}
    if config.parallel.tensor_parallel_size > 1:
        passes = {TensorParallel.name: pass_uuid(TensorParallel({}, 1))} | passes
    factors = {"config": graph_config(config), "passes": passes} | environment.as_factors()
    if asked := step_tensors(config.compile.passes):
        factors["step_tensors"] = {t.name: [list(t.dims), str(t.dtype), t.padding] for t in asked}
    if config.parallel.tensor_parallel_size > 1:
        factors["source"] |= digests_of(RANK_PACKAGES)
    if config.model.transformers is not None:
        factors["source"] |= digests_of(("models.foreign",))
    if config.model.vision is not None:
        factors["source"] |= digests_of(("models.vision",))
    if config.model.recurrences is not None:
        factors["source"] |= digests_of(RECURRENCE_PACKAGES)
    if config.images is not None:
        factors["source"] |= digests_of(IMAGE_PACKAGES)
    if config.speech is not None:
        factors["source"] |= digests_of(SPEECH_PACKAGES)
    return factors


def graph_config(config: EngineConfig) -> dict[str, Any]:
    """Return the config fields that are factors, by dotted name. Raises RuntimeError for a field that is in no list."""
    flat = flat_fields(replace(config, speculation=replace(config.speculation, draft=None)))
    optional = (
        *(*FOREIGN_FIELDS, *QUANTISED_FIELDS, *POOLING_FIELDS, *OTHER_POOLING_FIELDS, *RECURRENCE_FIELDS),
        *(*HEAD_FIELDS, *VISION_FIELDS, *ADAPTER_FIELDS, *OTHER_ADAPTER_FIELDS, *IMAGE_FIELDS, *OTHER_IMAGE_FIELDS),
        *(*LENGTH_ANGLES_FIELDS, *OTHER_INPUT_FIELDS, *OTHER_EVENT_FIELDS, *OTHER_BLOCK_FILE_FIELDS),
        *(*SPEECH_FIELDS, *OTHER_SPEECH_FIELDS),
    )
    declared = {CACHE_FORMAT, *FOR_HEADS, *GRAPH_FIELDS, *optional, *ANGLE_SCALE_FIELDS, *OTHER_FIELDS}
    undeclared = sorted(flat.keys() - declared)
    if undeclared:
        raise RuntimeError(f"config fields not declared as graph-affecting or not: {', '.join(undeclared)}")
    factors = {name: flat[name] for name in GRAPH_FIELDS} | {"model.rope.angle_scale": config.model.rope.angle_scale}
    if flat[CACHE_FORMAT] != AUTO:
        factors[CACHE_FORMAT] = flat[CACHE_FORMAT]
    factors |= {name: flat[name] for name in FOR_HEADS if flat[name]}
    more = (*FOREIGN_FIELDS, *QUANTISED_FIELDS, *POOLING_FIELDS, *RECURRENCE_FIELDS, *HEAD_FIELDS, *ADAPTER_FIELDS)
    more = (*more, *VISION_FIELDS, *IMAGE_FIELDS, *LENGTH_ANGLES_FIELDS, *SPEECH_FIELDS)
    if config.model.length_angles is not None:
        more = (*more, *ANGLE_CONSTANTS)
    return factors | {name: flat[name] for name in more if name in flat}
