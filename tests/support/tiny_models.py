"""Configurations of models so small that they are traced and run in milliseconds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from compiled_engine.config import EngineConfig, ExpertsConfig, RopeConfig
from compiled_engine.options import EngineOptions
from compiled_engine.resolve.engine import resolve


def tiny_config(
    architecture: str = "Qwen3ForCausalLM",
    num_layers: int = 2,
    *,
    compile_ranges: tuple[int, ...] | None = None,
    **changes: Any,
) -> EngineConfig:
    """Return the configuration of a tiny model on a CPU, in float32 by default. changes: fields of ModelConfig."""
    options = EngineOptions(
        device="cpu", mode="compiled", max_num_batched_tokens=256, max_num_seqs=8, compile_ranges=compile_ranges
    )
    config = resolve(options)
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 101,
        "rope": RopeConfig(10000.0),
        "qkv_bias": architecture == "Qwen2ForCausalLM",
        "experts": ExpertsConfig(4, 2, 32) if architecture == "Qwen3MoeForCausalLM" else ExpertsConfig(),
        "sliding_windows": (8 if architecture == "MistralForCausalLM" else None,) * num_layers,
    }
    return replace(
        config,
        model=replace(config.model, architecture=architecture, num_layers=num_layers, **shape | changes),
    )
