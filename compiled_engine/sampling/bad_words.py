"""bad_words: a token that would complete a forbidden sequence of generated tokens may not come."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_engine.sampling.logit_additions import Additions, forbid


class BadWords:
    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        """words: token ids of each forbidden sequence, none empty."""
        self._words = [(list(word[:-1]), word[-1]) for word in words]

    def additions(self, output_ids: Sequence[int]) -> Additions | None:
        """Only generated tokens count: a sequence may begin in the prompt."""
        completing = [last for start, last in self._words if _ends_with(output_ids, start)]
        return forbid(completing) if completing else None


def _ends_with(output_ids: Sequence[int], start: list[int]) -> bool:
    return len(start) <= len(output_ids) and list(output_ids[len(output_ids) - len(start) :]) == start
