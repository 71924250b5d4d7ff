"""How a model turns queries and keys by their positions: part of its configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: `kind` is default | linear | llama3 | yarn."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def angle_scale(self) -> float:
        """What cos and sin are multiplied by; other than 1 in YaRN (Peng et al., 2023) alone."""

        def magnitude(mscale: float) -> float:
            return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return magnitude(self.mscale) / magnitude(self.mscale_all_dim)
        return magnitude(1.0)
