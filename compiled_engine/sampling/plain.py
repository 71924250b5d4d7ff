"""Sampling by temperature and seed alone: nothing on the host decides anything, so it can be part of a CUDA graph."""

from __future__ import annotations

import torch

from compiled_engine.sampling import gumbel


def sample_plain(
    logits_RV: torch.Tensor,
    inverse_temperature_R: torch.Tensor,
    seeds_R: torch.Tensor,
    positions_R: torch.Tensor,
    threshold_R: torch.Tensor,
) -> torch.Tensor:
    """As gumbel.sample_tokens, for logits of any floating dtype."""
    if logits_RV.device.type == "cpu":
        return gumbel.sample_tokens(logits_RV.float(), inverse_temperature_R, seeds_R, positions_R, threshold_R)
    from compiled_engine.sampling import gumbel_triton  # Triton is not installed everywhere

    return gumbel_triton.sample_tokens(logits_RV, inverse_temperature_R, seeds_R, positions_R, threshold_R)
