"""Chooses the sharpness of a head's drafts: the factor on the head's logits with which most drafts are right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compiled_engine.engine.messages import SchedulerOutput

NAME = "speculation"  # of the extras of a step, with which the plan sets the sharpness of the head's drafts
# So large that sampling noise has no influence on drafts.
GREEDY_DRAFTS = 1e6
# Number of verified requests before a sharpness is judged.
LEAST = 64
# Number of requests over which shares are averaged, with exponential decay.
MEMORY = 2000
# Once in this number of steps another sharpness is used, each in turn, so that a change of the text is noticed.
PROBE_EVERY = 8


def sharpness_name(sharpness: float) -> str:
    """Return a sharpness as users write it: "greedy" for GREEDY_DRAFTS, otherwise the number."""
    return "greedy" if sharpness == GREEDY_DRAFTS else f"{sharpness:g}"


class DraftSharpness:
    """Chooses the factor on a head's logits with which the drafts of a step are sampled.

    A draft is right if the model samples the same token with the same noise. A head that is less certain than the model
    is right more often if its logits are made larger. An equally certain head is best with unchanged logits. Only a
    request's first draft in a step counts, because later drafts depend on it. Requests without a temperature do not
    count.
    """

    def __init__(self, candidates: Sequence[float]) -> None:
        """Choose among these candidates; the first is best until each has been measured."""
        self._candidates = tuple(candidates)
        self._seen = dict.fromkeys(self._candidates, 0.0)
        self._right = dict.fromkeys(self._candidates, 0.0)
        self._steps = self._probes = 0

    def choose(self) -> float:
        """Choose the sharpness of the next step's drafts, and return it: the best one, or one to be measured."""
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
        """Count the first draft of a request in a step. The request must have a temperature.

        sharpness: the draft was sampled with it. right: the draft was accepted.
        """
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
        """Return the best sharpness, and for each candidate the share of first drafts that were right."""
        return {
            "draft_sharpness": sharpness_name(self.best),
            "draft_sharpness_shares": {
                sharpness_name(candidate): round(self._share(candidate), 3) for candidate in self._candidates
            },
        }


def set_sharpness(step: SchedulerOutput, sharpness: float) -> None:
    """Store `sharpness` in the step's extras: its drafts are sampled from the logits times `sharpness`.

    See SpeculationConfig.sharpnesses.
    """
    if sharpness != 1.0:
        step.extras[NAME] = sharpness


def sharpness_of(step: SchedulerOutput) -> float:
    sharpness: float = step.extras.get(NAME, 1.0)
    return sharpness
