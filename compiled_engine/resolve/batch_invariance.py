"""Refuse options and models that a batch-invariant engine cannot compute with the same bits in every batch.

Models are also checked op by op when they are compiled, see passes/invariance/batch_invariance.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from compiled_engine.config import EngineConfig, ModelConfig
from compiled_engine.options import EngineOptions
from compiled_engine.schema import require_defaults


def require_invariant(options: EngineOptions, model: ModelConfig, device: torch.device, *, compiled: bool) -> None:
    """Raise ValueError if the options or the model rule out batch invariance. compiled: False in eager mode."""
    if not compiled:
        raise ValueError(
            "batch_invariant is True, but the mode is eager, whose linears are the library's; allowed: another mode"
        )
    asked = "batch_invariant is True"
    require_defaults(options, f"{asked}, which has kernels of its own", "attention_backend")
    require_defaults(options, f"{asked}, which needs every pass", "passes", "disable_passes")
    require_defaults(options, f"{asked}, which compiles one version for all sizes", "compile_ranges")
    reason = f"{asked}, and a reduce-scatter adds in an order that depends on its size"
    require_defaults(options, reason, "sequence_parallel")
    reason = f"{asked}, and the kernels of adapters are chosen by the number of tokens"
    require_defaults(options, reason, "enable_lora", allowed="or merge_adapter")
    for obstacle in _obstacles(model, device):
        raise ValueError(f"{asked}, but {obstacle}; allowed: models without this")


def require_invariant_steps(config: EngineConfig) -> None:
    """Raise ValueError if the resolved engine reads images or accepts drafts at random: neither is batch-invariant."""
    if config.images is not None:
        raise ValueError(
            "batch_invariant is True, but the model reads images, whose tower uses the library's linears; "
            "allowed: language_model_only"
        )
    if config.speculation.acceptance_rates:
        raise ValueError(
            "batch_invariant is True, but rejection_sample_method of speculative_config is synthetic, which accepts "
            "drafts at random; allowed: drafts that are verified"
        )


def _obstacles(model: ModelConfig, device: torch.device) -> Iterator[str]:
    if model.quantisation is not None and device.type == "cpu":
        yield "linears are quantised, which the library computes on a CPU"
    if model.latent_dim:
        yield "the kernels of latent attention divide contexts by the number of requests"
    if model.pooling is not None:
        yield "the model pools, and sums of pooled tokens depend on the chunks of a prompt"
    if model.speech is not None:
        yield "the encoder of speech uses the library's linears"
