"""logit_bias: a constant added to the logits of some tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from compiled_engine.sampling.logit_additions import Additions


class LogitBias:
    def __init__(self, bias: Mapping[int, float]) -> None:
        """bias: what to add, by token id."""
        token_ids = np.array(list(bias.keys()), dtype=np.int64)
        self._additions = Additions(token_ids, np.array(list(bias.values()), dtype=np.float32))

    def additions(self, output_ids: Sequence[int]) -> Additions | None:
        return self._additions
