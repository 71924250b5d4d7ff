"""Resolve the options of LoRA adapters, or raise an error that says what is allowed."""

from __future__ import annotations

from compiled_engine.config import AdapterConfig, ModelConfig, ParallelConfig
from compiled_engine.options import EngineOptions
from compiled_engine.schema import require_defaults

# Options that require enable_lora.
_NEEDING = ("max_loras", "max_lora_rank", "max_cpu_loras")


def resolve_adapters(
    options: EngineOptions, model: ModelConfig, parallel: ParallelConfig, *, reasons: dict[str, str]
) -> AdapterConfig | None:
    """Return the configuration of LoRA adapters, or None if the option enable_lora is not set.

    The reasons for values that were not given are added to `reasons`. Raises ValueError with the option, its value and
    what is allowed.
    """
    if not options.enable_lora:
        require_defaults(options, "enable_lora is False", *_NEEDING)
        return None
    if (reason := _obstacle(options, model, parallel)) is not None:
        require_defaults(options, reason, "enable_lora", allowed="or merge_adapter for a single adapter")
    max_cpu_loras = options.max_cpu_loras
    if max_cpu_loras is None:
        max_cpu_loras = options.max_loras
        reasons["adapters.max_cpu_loras"] = "as many as there are slots"
    elif max_cpu_loras < options.max_loras:
        raise ValueError(f"max_cpu_loras is {max_cpu_loras}; allowed: at least max_loras ({options.max_loras})")
    return AdapterConfig(options.max_loras, options.max_lora_rank, max_cpu_loras)


def _obstacle(options: EngineOptions, model: ModelConfig, parallel: ParallelConfig) -> str | None:
    """Return the reason why this engine cannot have adapters, or None if it can."""
    if model.experts.count:
        return "the model has experts, whose linears are no matrices of their own"
    if model.recurrences is not None:
        return "the model has recurrences"
    if parallel.num_stages > 1:
        return f"pipeline_parallel_size is {parallel.num_stages}"
    if options.sequence_parallel:
        return "sequence_parallel is True"
    return None
