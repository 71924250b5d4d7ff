"""Judges how many tokens a load must save to pay, by the times of copies at the start and of steps while they run.

A load takes a fixed time and the time of its copies. It pays if computing the tokens that it loads takes longer. Which
number of tokens that is depends on the card, the bus and the model. The rank times its copies when it starts. Steps are
timed while the engine runs: decodes, and the prompt tokens beside them. These steps occur whatever was judged, so a
wrong or outdated judgement does not persist.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compiled_engine.features.kv_offload.extras import BLOCKS, STATES

# Least tokens of a load until enough steps are timed.
FIRST_GUESS = 256
# The number of tokens if no load pays.
NEVER = 1 << 31
# Fixed time of a load, in steps of decodes. A request without a load is in the step that is planned when it arrives.
# With a load it waits for a later step, and on average half a step more until a step is planned after its copies.
STEPS_OF_LOAD = 2
# Steps with fewer prompt tokens are not timed: their time is that of reading the weights.
LEAST_PROMPT_TOKENS = 256
# Number of times after which a mean is used; the first ones may be slower than all others.
LEAST_TIMES = 3
# Weight of the newest time in a mean. A time that is longer than this multiple of the mean is ignored as held up,
# unless LEAST_TIMES in a row are.
WEIGHT, HELD_UP = 0.1, 2.0


def least_tokens(fixed_s: float, copy_s: float, compute_s: float) -> int:
    """Return the least number of tokens that are loaded in less time than they are computed; NEVER if there is none.

    fixed_s: seconds that a load takes besides its copies. copy_s, compute_s: seconds to copy and to compute a token.
    """
    gain_s = compute_s - copy_s
    if gain_s * NEVER <= fixed_s:
        return NEVER
    return math.floor(fixed_s / gain_s) + 1


@dataclass
class MeanTime:
    """A running mean of times in seconds, which single long times do not change."""

    count: int = 0
    seconds: float = math.inf
    held_up: int = 0  # newest times in a row that were held up

    @property
    def is_known(self) -> bool:
        return self.count >= LEAST_TIMES

    def took(self, seconds: float) -> None:
        self.count += 1
        self.held_up = self.held_up + 1 if self.is_known and seconds > HELD_UP * self.seconds else 0
        if self.count <= LEAST_TIMES:
            self.seconds = min(self.seconds, seconds)
        elif not self.held_up:
            self.seconds += WEIGHT * (seconds - self.seconds)
        elif self.held_up == LEAST_TIMES:
            self.seconds, self.held_up = seconds, 0


class BreakEven:
    """Times steps, and judges how many tokens a load must save.

    copy_seconds: for each rank, the seconds that it takes to copy a row of each kind to the device; a load takes as
    long as on the slowest rank. If ranks have no times, as on a CPU, FIRST_GUESS is used.
    """

    def __init__(self, copy_seconds: Sequence[Mapping[str, float]]) -> None:
        self._copy_seconds: dict[str, float] = {}
        if copy_seconds and all(copy_seconds):
            self._copy_seconds = {kind: max(each[kind] for each in copy_seconds) for kind in copy_seconds[0]}
        self._of_decodes, self._of_prompt_token = MeanTime(), MeanTime()
        self._planned: dict[int, tuple[int, float]] = {}  # steps in flight: prompt tokens, and when each was planned
        self._updated_s = 0.0  # when the last step was processed

    def planned(self, step: int, num_prompt_tokens: int, now_s: float) -> None:
        """Record that a step was planned. num_prompt_tokens: its tokens beside those of decodes; 0 or less: none."""
        if self._copy_seconds:
            self._planned[step] = num_prompt_tokens, now_s

    def updated(self, step: int, now_s: float) -> None:
        """Record that a step was processed. Steps are processed in the order of planning."""
        if step not in self._planned:
            return
        num_prompt_tokens, planned_s = self._planned.pop(step)
        seconds = now_s - max(planned_s, self._updated_s)  # the device runs one step after the other
        self._updated_s = now_s
        if num_prompt_tokens <= 0:
            self._of_decodes.took(seconds)
        elif num_prompt_tokens >= LEAST_PROMPT_TOKENS and self._of_decodes.is_known:
            self._of_prompt_token.took(max(0.0, seconds - self._of_decodes.seconds) / num_prompt_tokens)

    def failed(self) -> None:
        """Forget the steps in flight."""
        self._planned.clear()

    def least_tokens(self, block_size: int, *, has_state: bool = False) -> int:
        """Return how many tokens a load must save. has_state: the load has a snapshot of recurrent states too."""
        if not (self._of_decodes.is_known and self._of_prompt_token.is_known):
            return FIRST_GUESS
        fixed_s = STEPS_OF_LOAD * self._of_decodes.seconds
        if has_state:
            fixed_s += self._copy_seconds[STATES]
        return least_tokens(fixed_s, self._copy_seconds[BLOCKS] / block_size, self._of_prompt_token.seconds)
