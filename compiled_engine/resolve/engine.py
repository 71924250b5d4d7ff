"""Resolve options into the frozen configuration, with the reason for every chosen value.

Most options that cannot be honoured raise an error. Others, such as prefix caching, are turned off with a reason.
"""

from __future__ import annotations

import logging
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from compiled_engine.attention.backend import INVARIANT, AttentionChoice, choose_backend
from compiled_engine.attention.case import cases_of
from compiled_engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
    json_value,
)
from compiled_engine.engine.cache_memory import block_bytes
from compiled_engine.features.sleep.mapped_memory import PACKAGE, has_driver_functions
from compiled_engine.kv_format import AUTO, BY_OPTION, FP8
from compiled_engine.models.checkpoint.adapter_folder import OUTPUT, read_adapter
from compiled_engine.models.checkpoint.build_model import build_tensors
from compiled_engine.models.checkpoint.config_overrides import read_overrides
from compiled_engine.models.checkpoint.config_reader import DEFAULT_IGNORE, read_model_config
from compiled_engine.models.checkpoint.linear_names import linear_names, require_linears
from compiled_engine.models.checkpoint.pooling_folder import PoolingOptions
from compiled_engine.options import EngineOptions
from compiled_engine.parallel.rank_share import local_share
from compiled_engine.pooling import PoolerConfig
from compiled_engine.process.progress import Progress, SilentProgress
from compiled_engine.resolve.adapters import resolve_adapters
from compiled_engine.resolve.batch_invariance import require_invariant, require_invariant_steps
from compiled_engine.resolve.compile import compiler_obstacle, resolve_compile
from compiled_engine.resolve.cuda_graphs import reached_short_contexts, recording_obstacle, resolve_graphs
from compiled_engine.resolve.folders import (
    resolve_adapter_folder,
    resolve_cache_dir,
    resolve_model_folder,
    resolve_tokenizer_folder,
)
from compiled_engine.resolve.host_blocks import resolve_host_blocks
from compiled_engine.resolve.image_input import processor_settings, resolve_image_input
from compiled_engine.resolve.images import resolve_images
from compiled_engine.resolve.kv_events import resolve_kv_events
from compiled_engine.resolve.parallel import resolve_parallel
from compiled_engine.resolve.recurrences import (
    MIB,
    most_requests,
    resolve_rows,
    resolve_snapshots,
    resolve_states,
    snapshot_bytes,
    state_bytes,
)
from compiled_engine.resolve.speculation import num_drafts_asked, resolve_speculation
from compiled_engine.resolve.speech import resolve_speech
from compiled_engine.sampling.logits_processor import resolve_logits_processors
from compiled_engine.schema import require_defaults

log = logging.getLogger("compiled_engine")

DEFAULT_LIMITS = {"cuda": (256, 8192), "cpu": (64, 2048)}


def resolve(options: EngineOptions, progress: Progress | None = None) -> EngineConfig:
    """Return the configuration for these options. Downloads missing files of checkpoints from the hub.

    The downloads include the weights of a merged adapter and of a draft head, which are read now, but not the weights
    of models. Raises ValueError, TypeError or OSError with the field, the value and what is allowed.
    """
    progress = progress or SilentProgress()
    resolve_logits_processors(options.logits_processors)  # checked only: objects are not part of the configuration
    reasons: dict[str, str] = {}
    device = resolve_device(options.device, reasons)
    model = _model(options, device, reasons, progress)
    parallel = resolve_parallel(options, model, device, reasons)
    if device.type != "cpu":
        _require_driver_functions(options)
    compiled, graphed = _mode(options, device, reasons)
    if options.batch_invariant:
        require_invariant(options, model, device, compiled=compiled)
    if not compiled:
        reason = "mode is 'eager': stages are parts of the compiled model"
        require_defaults(options, reason, "pipeline_parallel_size", allowed="or mode compiled or graphed")
    if not compiled and model.quantisation is not None and model.quantisation.is_online:
        reason = "the mode is eager, which computes with the weights of the checkpoint"
        require_defaults(options, reason, "quantization", allowed="or another mode")
    kv_dtype = _kv_dtype(options, model, compiled, reasons)
    model = resolve_states(model, num_drafts_asked(options))
    rank_state_bytes = state_bytes(model, parallel.tensor_parallel_size)
    scheduler = _scheduler(options, model, device, rank_state_bytes, reasons)
    num_bytes = snapshot_bytes(model, parallel.tensor_parallel_size)
    num_snapshots = resolve_snapshots(options, num_bytes, scheduler.max_num_seqs, device, reasons)
    if model.recurrences is not None:
        num_rows = scheduler.max_num_seqs
        recurrences = resolve_rows(model.recurrences, rank_state_bytes, num_rows, num_snapshots, reasons)
        model = replace(model, recurrences=recurrences)
    if model.pooling is not None:
        _check_pooling(options, model)
    caches_prefixes = _caches_prefixes(options, model, num_snapshots, reasons)
    attention = _attention(options, local_share(model, parallel.tensor_parallel_size), device, kv_dtype)
    reasons |= attention.reasons
    compile_config = resolve_compile(options, compiled, model, scheduler, device, reasons)
    speech = resolve_speech(options, model, scheduler, device, reasons)
    settings = processor_settings(options)
    images = resolve_images(options, model, scheduler, parallel, attention.backend, settings, reasons)
    image_input = resolve_image_input(options, model, None if images is None else images.vision, reasons)
    images = images if image_input is not None else None
    config = EngineConfig(
        model=model,
        tokenizer=resolve_tokenizer_folder(options, reasons, progress),
        cache=CacheConfig(
            attention.block_size, options.num_blocks, options.gpu_memory_utilization, caches_prefixes, kv_dtype
        ),
        scheduler=scheduler,
        compile=compile_config,
        graph=resolve_graphs(
            options,
            compiled=compiled,
            graphed=graphed,
            attention=attention,
            short_contexts=reached_short_contexts(compile_config, attention),
            recording_obstacle=recording_obstacle(compile_config, parallel, model, attention, device),
            model=model,
            scheduler=scheduler,
            device=device,
            reasons=reasons,
            decodes=model.causal,
        ),
        parallel=parallel,
        device=device,
        attention_backend=attention.backend,
        reasons=reasons,
        speculation=SpeculationConfig(),
        adapters=resolve_adapters(options, model, parallel, reasons=reasons),
        images=images,
        image_input=image_input,
        speech=speech,
        kv_events=resolve_kv_events(options, caches_prefixes, reasons),
        sleeps=options.enable_sleep_mode,
        logprobs_mode=options.logprobs_mode,
        batch_invariant=options.batch_invariant,
    )
    config = replace(config, speculation=resolve_speculation(options, config, progress))
    if config.batch_invariant:
        require_invariant_steps(config)
    if model.latent_dim:
        reasons["model.latent_dim"] = (
            "latent attention: a row of the KV cache is the key and the value of all heads; a block of "
            f"{config.cache.block_size} tokens has {block_bytes(config):,} bytes on a rank"
        )
    return replace(config, cache=resolve_host_blocks(options, config))


def _require_driver_functions(options: EngineOptions) -> None:
    if options.enable_sleep_mode and not has_driver_functions():
        reason = f"memory of a GPU is mapped by the Python package {PACKAGE}, which is not installed"
        require_defaults(options, reason, "enable_sleep_mode", allowed=f"or {PACKAGE}, or device 'cpu'")


def _model(options: EngineOptions, device: torch.device, reasons: dict[str, str], progress: Progress) -> ModelConfig:
    """Return the model's configuration from the checkpoint, and from the adapter that is merged into it, if any."""
    folder = resolve_model_folder(options, reasons, progress)
    pooler = PoolerConfig.of(options.pooler_config or {})
    model, model_reasons = read_model_config(
        folder.path,
        hub_name=folder.hub_name,
        revision=folder.revision,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        load_format=options.load_format,
        seed=options.seed,
        device_type=device.type,
        model_impl=options.model_impl,
        cache_dir=resolve_cache_dir(options),
        quantization=options.quantization,
        quantization_ignore=options.quantization_ignore,
        overrides=read_overrides(options.hf_overrides),
        pooling=PoolingOptions(options.runner, pooler.converts(options.convert), pooler),
    )
    reasons |= model_reasons
    if options.merge_adapter is not None:
        model = _with_adapter(options, options.merge_adapter, model, reasons, progress)
    # Names of heads and routers are always accepted: pooling models have no head, and few models have routers.
    if asked := [each for each in options.quantization_ignore if each not in (OUTPUT, *DEFAULT_IGNORE)]:
        names = linear_names(build_tensors(model, resolve_cache_dir(options)))
        require_linears("quantization_ignore", asked, names)
    return model


def _with_adapter(
    options: EngineOptions, given: str | Path, model: ModelConfig, reasons: dict[str, str], progress: Progress
) -> ModelConfig:
    """Return the configuration of the model with a merged adapter. given: the option merge_adapter.

    The adapter is read now, so that errors are raised early. Tied embeddings are untied if the adapter changes only one
    of embedding and output projection. Raises ValueError if that is impossible, or if load_format is "dummy".
    """
    if options.load_format == "dummy":
        raise ValueError("load_format is 'dummy', but merge_adapter is given; allowed: auto, safetensors")
    folder = resolve_adapter_folder("merge_adapter", given, options.download_dir, progress)
    adapter = read_adapter(folder)
    model = replace(model, merged_adapter=folder)
    if not (model.tie_word_embeddings and adapter.parts_tied_weights):
        return model
    if model.transformers is not None:
        raise ValueError(
            f"merge_adapter is {str(folder)!r}, which changes one of an embedding and an output projection that are "
            "tied, in a model of transformers; allowed: enable_lora, or model_impl 'textbook' if it has one"
        )
    reasons["model.tie_word_embeddings"] = "the merged adapter changes the embedding or the output projection"
    return replace(model, tie_word_embeddings=False)


def _kv_dtype(options: EngineOptions, model: ModelConfig, compiled: bool, reasons: dict[str, str]) -> str:
    kv_dtype = BY_OPTION[options.kv_cache_dtype]
    if kv_dtype == AUTO:
        reasons["cache.kv_dtype"] = f"kv_cache_dtype is auto: keys and values are stored in {json_value(model.dtype)}"
    with_attention = filter(lambda heads: heads.num_heads, map(model.heads_of, range(model.num_layers)))
    if kv_dtype == FP8 and not compiled and not all(heads.latent_dim for heads in with_attention):
        reason = "the mode is eager, which reads no scales of keys and values"
        require_defaults(options, reason, "kv_cache_dtype", allowed="int8, or another mode")
    if model.linear_biases and kv_dtype != AUTO:
        reason = "keys have their positions as elements (ALiBi), which 8 bits would round"
        require_defaults(options, reason, "kv_cache_dtype")
    return kv_dtype


def _check_pooling(options: EngineOptions, model: ModelConfig) -> None:
    require_defaults(options, "the model pools", "pipeline_parallel_size", "logits_processors")
    if not model.causal:
        require_defaults(options, "an encoder has no KV cache", "num_blocks")


def _caches_prefixes(options: EngineOptions, model: ModelConfig, num_snapshots: int, reasons: dict[str, str]) -> bool:
    """Return whether prefixes are cached: the option must request it, and the model must allow it.

    If only the model does not allow it, the reason is added to `reasons`.
    """
    if not options.enable_prefix_caching:
        return False
    if model.recurrences is not None and not num_snapshots:
        reason = "num_state_snapshots is 0, and the model has recurrences"
    elif model.pooling is not None and not model.causal:
        reason = "an encoder caches nothing: every token sees those behind it"
    elif model.pooling is not None and model.pooling.every_token:
        kinds = " + ".join(model.pooling.kinds)
        reason = f"pooling is {kinds}: it needs hidden states, which the cache does not hold"
    else:
        return True
    reasons["cache.enable_prefix_caching"] = reason
    return False


def warn_if_eager(options: EngineOptions, config: EngineConfig) -> None:
    """Log a warning if `mode` is "auto" and resolves to eager, because nothing can be compiled on this machine."""
    if options.mode == "auto" and (obstacle := compiler_obstacle(config.device)) is not None:
        log.warning("mode is eager, which is slower: %s", obstacle)


def resolve_device(asked: str, reasons: dict[str, str]) -> torch.device:
    """Return the device for "auto", "cpu", "cuda" or "cuda:N". For "auto", the reason is added to `reasons`.

    Raises ValueError for any other value, and for a GPU that this machine does not have.
    """
    if asked == "auto":
        if torch.cuda.is_available():
            reasons["device"] = "an NVIDIA GPU is there"
            return torch.device("cuda", torch.cuda.current_device())
        reasons["device"] = "no NVIDIA GPU was found"
        return torch.device("cpu")
    # torch truncates a large index to its low bits, which may select another GPU.
    if not re.fullmatch(r"cpu|cuda(:(0|[1-9][0-9]?))?", str(asked)):
        raise ValueError(f"device is {asked!r}; allowed: auto, cpu, cuda, cuda:N")
    device = torch.device(asked)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {asked!r}, but torch finds no CUDA GPU here; allowed: auto, cpu")
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise ValueError(f"device is {asked!r}; allowed: cuda:0 to cuda:{torch.cuda.device_count() - 1}")
        device = torch.device("cuda", index)
    return device


def _mode(options: EngineOptions, device: torch.device, reasons: dict[str, str]) -> tuple[bool, bool]:
    """Return (whether to compile, whether to use graphs) for the option `mode`.

    Raises ValueError if the mode needs a compiler and nothing can be compiled on this machine.
    """
    mode = options.mode
    obstacle = compiler_obstacle(device)
    if mode == "auto" and obstacle is not None:
        mode = "eager"
        reasons["compile.enabled"] = f"mode is eager: {obstacle}"
    elif mode == "auto" and options.graph_mode == "breakable":
        mode = "eager"
        reasons["compile.enabled"] = "graph_mode is breakable, which captures eager code"
    elif mode == "auto" and options.graph_mode == "none":
        mode = "compiled"
        reasons["compile.enabled"] = "graph_mode is none, so mode is compiled"
    elif mode == "auto":
        mode = "graphed"
        reasons["compile.enabled"] = "mode is graphed by default"
    if obstacle is not None and mode != "eager":
        raise ValueError(f"mode is {mode!r}, but {obstacle}; allowed: eager")
    return mode != "eager", mode == "graphed"


def _scheduler(
    options: EngineOptions, model: ModelConfig, device: torch.device, request_bytes: int, reasons: dict[str, str]
) -> SchedulerConfig:
    """Return the scheduler's configuration. request_bytes: size of a request's recurrent states on a rank.

    Raises ValueError if max_num_batched_tokens is below max_num_seqs.
    """
    default_seqs, default_tokens = DEFAULT_LIMITS[device.type]
    max_num_seqs = options.max_num_seqs
    if max_num_seqs is None:
        max_num_seqs = default_seqs
        if options.max_num_batched_tokens is not None:
            max_num_seqs = min(max_num_seqs, options.max_num_batched_tokens)
        reasons["scheduler.max_num_seqs"] = f"default on {device.type}"
        if (most := most_requests(request_bytes, device)) is not None and most < max_num_seqs:
            max_num_seqs = most
            reasons["scheduler.max_num_seqs"] = f"each request has recurrent states of {request_bytes / MIB:.1f} MiB"
    max_num_batched_tokens = options.max_num_batched_tokens
    if max_num_batched_tokens is None:
        max_num_batched_tokens = max(default_tokens, max_num_seqs)
        reasons["scheduler.max_num_batched_tokens"] = f"default on {device.type}"
        if not model.causal and model.max_model_len > max_num_batched_tokens:
            max_num_batched_tokens = model.max_model_len
            reasons["scheduler.max_num_batched_tokens"] = "an encoder computes an input in one step: max_model_len"
    if max_num_batched_tokens < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens is {max_num_batched_tokens}; allowed: at least max_num_seqs ({max_num_seqs}), "
            "so that every running request can decode in a step"
        )
    ahead = options.async_scheduling
    if ahead is None:
        ahead = device.type == "cuda"
        reasons["scheduler.async_scheduling"] = f"default on {device.type}"
    return SchedulerConfig(
        max_num_seqs,
        max_num_batched_tokens,
        model.max_model_len,
        options.scheduling_policy,
        ahead,
        options.max_prefill_tokens,
    )


def _attention(options: EngineOptions, model: ModelConfig, device: torch.device, kv_dtype: str) -> AttentionChoice:
    cases = cases_of(model, 0, device, kv_dtype)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        backend = INVARIANT[device.type] if options.batch_invariant else options.attention_backend
        return choose_backend(backend, options.block_size, cases)
