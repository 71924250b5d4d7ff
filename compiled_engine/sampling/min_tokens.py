"""min_tokens: no token that ends generation until enough have been generated."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_engine.sampling.logit_additions import Additions, forbid


class MinTokens:
    def __init__(self, min_tokens: int, ending_ids: Sequence[int]) -> None:
        """ending_ids: the end-of-sequence and stop token ids."""
        self._min_tokens = min_tokens
        self._forbidden = forbid(ending_ids)

    def additions(self, output_ids: Sequence[int]) -> Additions | None:
        return self._forbidden if len(output_ids) < self._min_tokens else None
