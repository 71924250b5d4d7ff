"""Steps that were launched and whose tokens the host has not read yet."""

from __future__ import annotations

from collections import deque
from itertools import compress

import torch

from compiled_engine.runner.input_batch import InputBatch
from compiled_engine.runner.input_buffers import RING, InputBuffers
from compiled_engine.sampling.sampler import SampledRows, Sampler
from compiled_engine.scheduling.step import RunnerOutput, TokenLogprobs

PromptLogprobs = dict[str, tuple[int, list[TokenLogprobs]]]
# Fewer than the ring holds, as a step may write to it twice.
MOST_PENDING = 2


class PendingSteps:
    """Counts what was launched, as the device does: a step's tokens lie in the ring under its number."""

    def __init__(self, buffers: InputBuffers, sampler: Sampler, device: torch.device):
        self._buffers, self._sampler, self._device = buffers, sampler, device
        self._number = 0
        self._unsettled: deque[PendingStep] = deque()

    def launched(self) -> None:
        """Tokens are on their way into the ring."""
        self._number += 1

    def resynchronise(self) -> None:
        """Take the number from the device, after steps of which nobody was told."""
        self._number = int(self._buffers.num_steps_1)

    def step(self, batch: InputBatch, sampled: SampledRows | None, prompt: PromptLogprobs) -> PendingStep:
        """The step whose tokens were launched last."""
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        step = PendingStep(self._buffers, self._sampler, self._number, event, batch, sampled, prompt)
        while len(self._unsettled) >= MOST_PENDING:
            self._unsettled.popleft().settle()
        self._unsettled.append(step)
        return step

    def settle(self) -> None:
        """Wait for the tokens of all steps: the sampler knows them then."""
        while self._unsettled:
            self._unsettled.popleft().settle()


class PendingStep:
    """A launched step. `result` waits for it."""

    def __init__(
        self,
        buffers: InputBuffers,
        sampler: Sampler,
        number: int,
        event: torch.cuda.Event | None,
        batch: InputBatch,
        sampled: SampledRows | None,
        prompt: PromptLogprobs,
    ):
        self._buffers, self._sampler, self._number, self._event = buffers, sampler, number, event
        self._batch, self._sampled, self._prompt = batch, sampled, prompt
        self._tokens: list[int] | None = None

    def settle(self) -> None:
        """Wait for the tokens, once, and let the sampler take them into its rows' histories."""
        if self._tokens is not None:
            return
        if self._event is not None:
            self._event.synchronize()
        ring_row = self._buffers.tokens_KR1[self._number % RING].numpy()
        if ring_row[0] != self._number:
            raise RuntimeError(f"the tokens of step {self._number} were overwritten by step {ring_row[0]}")
        self._tokens = ring_row[1 : self._batch.num_requests + 1].tolist()
        self._sampler.record(self._batch.rows, self._batch.samples, self._tokens)

    def result(self) -> RunnerOutput:
        """What the step produced."""
        self.settle()
        assert self._tokens is not None
        samples, token_ids = self._batch.samples, self._tokens
        if not samples.all():
            token_ids = list(compress(token_ids, samples.tolist()))
        logprobs = {}
        if self._sampled is not None:
            entries = zip(self._batch.sampling_ids, self._sampled.logprobs(), strict=True)
            logprobs = {request_id: entry for request_id, entry in entries if entry is not None}
        return RunnerOutput(token_ids, logprobs, self._prompt)
