"""A configuration's model: the textbook's or transformers' code, or of the latter the tensors alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compiled_engine.config import ModelConfig
from compiled_engine.models.foreign.description import skeleton
from compiled_engine.models.foreign.find_description import find_description
from compiled_engine.models.textbook import architectures


def build_model(config: ModelConfig) -> Any:
    """The model on the meta device, in config.dtype; `parameters.materialize` gives its parameters memory.

    It has `forward(input_ids_T, positions_T, attention_inputs, kv_caches) -> hidden_TD` and
    `logits(hidden_RD) -> logits_RV`. Buffers (rotary frequencies) are fp32 on the CPU.
    """
    if config.transformers is None:
        return architectures.build_model(config)
    from compiled_engine.models.foreign.transformers_model import build_foreign_model  # imports transformers

    return build_foreign_model(config.transformers.config, config.dtype)[0]


def build_tensors(config: ModelConfig, cache_dir: Path | None) -> Any:
    """The model to be given memory and weights where its code is compiled already: without its code if that is
    transformers'."""
    if config.transformers is None:
        return architectures.build_model(config)
    return skeleton(find_description(config.transformers.config, config.dtype, cache_dir))
