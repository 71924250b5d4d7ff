"""Numbers of drafts that are not chosen by times: at random, or none, so that a head rests."""

from __future__ import annotations

import random

from compiled_engine.config import draft_lengths
from compiled_engine.features.speculation.draft_length import DraftLength, Drafts


class AnyLength(DraftLength):
    """Chooses a random number of drafts, and lets the head rest in some steps. No choice depends on measured times."""

    share_at_rest = 0.08

    def __init__(self, most: int, *, skips_head: bool = False) -> None:
        super().__init__(most, skips_head=skips_head)
        self._draw, self._numbers = random.Random(most + 18), draft_lengths(most)

    def choose(self, num_requests: int, num_drafting: int | None = None) -> Drafts:
        if self.skips_head and self._draw.random() < self.share_at_rest:
            return Drafts(0, skips_head=True)
        return Drafts(self._draw.choice(self._numbers))


class AtRest(AnyLength):
    """Lets the head rest from the first prompt on."""

    share_at_rest = 1.0
