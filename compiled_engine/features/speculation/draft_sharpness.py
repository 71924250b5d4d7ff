"""The sharpness of a head's drafts: that with which most of them are right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Leaves the noise of sampling no influence on drafts.
GREEDY_DRAFTS = 1e6
# Requests of which a sharpness has drafted before it is judged.
LEAST = 64
# Requests that count: older ones fade.
MEMORY = 2000
# Every so many steps another sharpness drafts, each in turn, so that a change of the text is noticed.
PROBE_EVERY = 8


def sharpness_name(sharpness: float) -> str:
    """Return it as users write it."""
    return "greedy" if sharpness == GREEDY_DRAFTS else f"{sharpness:g}"


class DraftSharpness:
    """Chooses the factor on a head's logits with which the drafts of a step are sampled.

    A draft is right if the model samples the same token with the same noise. A head that is less certain than the model
    is right more often if its logits grow; one that is as certain, if they stay. The first draft of a request in a step
    tells; later ones depend on it. Requests without a temperature tell nothing.
    """

    def __init__(self, candidates: Sequence[float]) -> None:
        """candidates: the first is in use until all are known."""
        self._candidates = tuple(candidates)
        self._seen = dict.fromkeys(self._candidates, 0.0)
        self._right = dict.fromkeys(self._candidates, 0.0)
        self._steps = self._probes = 0

    def choose(self) -> float:
        """Return the sharpness of the next step."""
        least = min(self._candidates, key=lambda candidate: self._seen[candidate])
        if self._seen[least] < LEAST:
            return least
        self._steps += 1
        if len(self._candidates) == 1 or self._steps % PROBE_EVERY:
            return self.best
        self._probes += 1
        others = [candidate for candidate in self._candidates if candidate != self.best]
        return others[self._probes % len(others)]

    def verified(self, sharpness: float, *, right: bool) -> None:
        """Take in the first draft of a request that has a temperature."""
        self._seen[sharpness] += 1 - self._seen[sharpness] / MEMORY
        self._right[sharpness] += right - self._right[sharpness] / MEMORY

    @property
    def best(self) -> float:
        if min(self._seen.values()) < LEAST:
            return self._candidates[0]
        return max(self._candidates, key=self._share)

    def _share(self, candidate: float) -> float:
        return self._right[candidate] / max(self._seen[candidate], 1.0)

    def metrics(self) -> dict[str, Any]:
        """draft_sharpness: in use. draft_sharpness_shares: of each, the share of first drafts that were right."""
        return {
            "draft_sharpness": sharpness_name(self.best),
            "draft_sharpness_shares": {
                sharpness_name(candidate): round(self._share(candidate), 3) for candidate in self._candidates
            },
        }
