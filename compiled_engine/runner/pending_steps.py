"""Steps that were launched and whose tokens the host has not read yet."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress

import numpy as np
import torch

from compiled_engine.messages import RunnerOutput
from compiled_engine.process.profiling import StepClock
from compiled_engine.runner.input_batch import InputBatch
from compiled_engine.runner.input_buffers import LAST_NUMBER, RING, InputBuffers
from compiled_engine.sampling.logprobs import BatchLogprobs
from compiled_engine.sampling.token_logprobs import LogprobRows


@dataclass(frozen=True)
class PromptLogprobs:
    """Of one request: the position of the first row, and the chunks that they come in, see logprob_rows."""

    first: int
    chunks: list[torch.Tensor]

    def rows(self) -> LogprobRows:
        return LogprobRows.of_array(torch.cat(self.chunks).numpy())


class PendingSteps:
    """Counts what was launched, as the device does: a step's tokens lie in the ring under its number.

    Fewer steps may be pending than the ring holds, as a step may write to it twice.
    """

    def __init__(self, buffers: InputBuffers, device: torch.device, clock: StepClock):
        self._buffers, self._device, self._clock = buffers, device, clock
        self._ring_KR1 = buffers.tokens_KR1.numpy()
        self._number = 0
        self._is_known = False  # whether that is the device's number

    def launched(self) -> None:
        """Tokens are on their way into the ring."""
        self._number = (self._number + 1) & LAST_NUMBER

    def lose_count(self) -> None:
        """The device may have counted steps of which nobody was told."""
        self._is_known = False

    def catch_up(self) -> None:
        """Take the number from the device, where it is not known: waits for it."""
        if not self._is_known:
            self._number = int(self._buffers.num_steps_1)
            self._is_known = True

    def step(self, batch: InputBatch, logprobs: BatchLogprobs | None, prompt: dict[str, PromptLogprobs]) -> PendingStep:
        """The step whose tokens were launched last."""
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        return PendingStep(self._ring_KR1, self._number, event, batch, logprobs, prompt, self._clock)


class PendingStep:
    """A launched step. `result` waits for it."""

    def __init__(
        self,
        ring_KR1: np.ndarray,
        number: int,
        event: torch.cuda.Event | None,
        batch: InputBatch,
        logprobs: BatchLogprobs | None,
        prompt: dict[str, PromptLogprobs],
        clock: StepClock,
    ):
        self._clock = clock
        self._ring_KR1, self._number, self._event = ring_KR1, number, event
        self._batch, self._logprobs, self._prompt = batch, logprobs, prompt

    def result(self) -> RunnerOutput:
        """What the step produced. Raises RuntimeError if its tokens are gone: it was asked for too late."""
        if self._event is not None:
            self._event.synchronize()
        self._clock.lap("wait")
        ring_row = self._ring_KR1[self._number % RING]
        if ring_row[0] != self._number:
            raise RuntimeError(f"the tokens of step {self._number} were overwritten by step {ring_row[0]}")
        batch = self._batch
        tokens_R, samples_R = ring_row[1 : batch.num_requests + 1], batch.samples
        if batch.order is not None:
            tokens_R, samples_R = tokens_R[batch.order], samples_R[batch.order]
        token_ids = tokens_R.tolist()
        if not samples_R.all():
            token_ids = list(compress(token_ids, samples_R.tolist()))
        prompt = {request_id: (found.first, found.rows()) for request_id, found in self._prompt.items()}
        if self._logprobs is None:
            return RunnerOutput(token_ids, prompt_logprobs=prompt)
        few = None
        if self._logprobs.few_SW is not None:
            sampled = np.flatnonzero(samples_R) if batch.order is None else batch.order[samples_R]
            few = LogprobRows.of_array(self._logprobs.few_SW.numpy()[sampled])
        many = {batch.request_ids[i]: LogprobRows.of_array(row.numpy()) for i, row in self._logprobs.many.items()}
        return RunnerOutput(token_ids, few, many, prompt)


@dataclass
class UnsampledStep:
    """A launched step whose sampling awaits masks: its logits [R, V], valid until the next step is launched.

    sampled: the step as it is pending afterwards.
    """

    batch: InputBatch
    logits_RV: torch.Tensor
    prompt: dict[str, PromptLogprobs]
    sampled: PendingStep | None = None

    def result(self) -> RunnerOutput:
        """As PendingStep. Raises RuntimeError if nothing was sampled, as when a step before it has failed."""
        if self.sampled is None:
            raise RuntimeError("the step was not sampled: its masks did not come")
        return self.sampled.result()
