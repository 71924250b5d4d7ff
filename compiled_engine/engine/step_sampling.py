"""Samples a step, from its hidden states to its tokens, and returns the tokens to the host.

`StepSampling` launches these parts, in this order:

  1. The logits of the rows that sample, and a token for each by temperature and seed. The states advance, and the
     tokens go to the host. A decode graph ends with this part (`launch_first`); for other batches it follows the
     forward (`launch_rest`). A step that samples nothing (a prompt chunk, or a step with another tail) only advances
     the states.
  2. New tokens for rows with more parameters than temperature and seed, in the order of sampler.py (`complete`). They
     replace the first tokens in the states and on the host. If this part awaits inputs that the host computes while the
     step runs, such as token masks, it is launched when they have arrived.
  3. The log-probabilities of the tokens, if requested.

If the vocabulary is sharded, each part exchanges a few numbers between ranks. No launch waits for the device: tokens
reach the host through a ring buffer in pinned memory, from which `PendingStep.result` reads them when the step ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import compress
from typing import Any, Protocol

import numpy as np
import torch

from compiled_engine.engine.forward import ForwardOutput, ModelForward
from compiled_engine.engine.input_batch import LAST_NUMBER, RING, InputBatch, InputBuffers
from compiled_engine.engine.messages import RunnerOutput
from compiled_engine.engine.request_states import RequestStates
from compiled_engine.kernels.launch_arguments import dependent_launch, next_power_of_2
from compiled_engine.process.profiling import StepClock
from compiled_engine.rows.staged_writes import upload
from compiled_engine.sampling.logprobs import BatchLogprobs, batch_logprobs
from compiled_engine.sampling.sampled_tokens import LogprobRows
from compiled_engine.sampling.sampler import Sampler, SamplerClass, StepEdits


class StepSampling:
    """Follows the forward in a runner that samples (implements step_hooks.Tail); see the module's docstring."""

    def __init__(
        self,
        model: ModelForward,
        sampler: Sampler,
        buffers: InputBuffers,
        ring: TokenRing,
        advance: Advance,
        *,
        processed: bool = False,
    ):
        """Make the tail. processed: log-probabilities are of the processed logits, from which tokens are drawn."""
        self._processed = processed
        self._model, self.sampler, self._buffers = model, sampler, buffers
        self._ring, self.advance = ring, advance

    def launch_rest(
        self, batch: InputBatch, output: ForwardOutput, results: dict[str, Deferred]
    ) -> torch.Tensor | None:
        return output.tensor if batch.has_decode_graph else self.sample(batch, output)

    def sample(self, batch: InputBatch, output: ForwardOutput) -> torch.Tensor | None:
        """Compute logits, and sample by temperature and seed: part 1 of the module, for a batch without a decode graph.

        Returns the logits [R, V] of all rows but padding; None if no row samples.
        """
        count = batch.num_real_rows  # padding rows need no logits here
        if not batch.samples.any():
            self.advance(batch, None, count)
            return None
        if len(output.tensor) != count:  # otherwise each token is a row, and nothing has to be gathered
            every = batch.num_tokens == count
            output = output.of_tokens(slice(count) if every else self._buffers.logits_index_R[:count])
        return self.launch_first(batch, output, count)

    def launch_first(self, batch: InputBatch, output: ForwardOutput, num_rows: int) -> torch.Tensor:
        """Sample a token for each of `num_rows` rows by temperature and seed, and advance the states.

        Returns the rows' logits. A CUDA graph may capture the launches. output: has one entry per row.
        """
        logits_RV = self._model.logits_of(output)
        rows = slice(0, num_rows)
        token_ids_R = torch.empty(num_rows, dtype=torch.int64, device=logits_RV.device)
        row_index_R, positions_R = self._buffers.rows_R[rows], self._buffers.sample_positions_R[rows]
        own_RV = logits_RV.float() if logits_RV.device.type == "cpu" else logits_RV
        self.sampler.sample_by_temperature(own_RV[rows], row_index_R, positions_R, token_ids_R)
        self.advance(batch, token_ids_R, num_rows)
        return logits_RV

    def complete(
        self, batch: InputBatch, logits_RV: torch.Tensor, edits: StepEdits | None = None
    ) -> BatchLogprobs | None:
        """Sample again the rows with more parameters than temperature and seed, and compute log-probabilities.

        These are parts 2 and 3 of the module. Returns the log-probabilities; None if no request asks for any.
        logits_RV: the logits from part 1. edits: see StepFeature.edits.
        """
        rows_R = np.where(batch.samples, batch.rows, -1)
        num_logprobs_R, count = self.sampler.num_logprobs(rows_R), batch.num_real_rows
        own_RV, processed_RV = logits_RV[:count], None
        if self._processed and num_logprobs_R is not None:
            processed_RV = torch.empty(own_RV.shape, dtype=torch.float32, device=own_RV.device)
        if self.sampler.sampler_class(rows_R) is SamplerClass.GENERAL:
            self._sample_generally(batch, rows_R, own_RV, edits, processed_RV)
        elif processed_RV is not None:
            self.sampler.process(own_RV, self._buffers.rows_R[:count], processed_RV)
        if num_logprobs_R is None:
            return None
        token_ids_R = self.advance.tokens(batch, count)
        values_RV = own_RV if processed_RV is None else processed_RV
        return batch_logprobs(values_RV, token_ids_R, num_logprobs_R, vocabulary=self.sampler.vocabulary)

    def _sample_generally(
        self,
        batch: InputBatch,
        rows_R: np.ndarray,
        logits_RV: torch.Tensor,
        edits: StepEdits | None,
        processed_RV: torch.Tensor | None,
    ) -> None:
        count = batch.num_real_rows
        row_index_R = self._buffers.rows_R[:count]
        if not batch.samples.all():
            row_index_R = upload(rows_R.astype(np.int32), logits_RV.device)
        positions_R = self._buffers.sample_positions_R[:count]
        token_ids_R = self.sampler.sample(logits_RV, rows_R, row_index_R, positions_R, edits, processed_RV)
        self.advance(batch, token_ids_R, batch.num_rows, again=True)
        self._ring.launched()


class Advance(Protocol):
    """Interface that updates the request states after a step: their numbers of computed tokens, and their new tokens.

    Tokens are also stored in the ring buffer that the host reads. A CUDA graph may capture the launches.
    """

    def __call__(
        self, batch: InputBatch, token_ids_R: torch.Tensor | None, num_rows: int, *, again: bool = False
    ) -> None:
        """Advance the states of the batch's first `num_rows` rows.

        token_ids_R: the sampled tokens, int64; None if the step samples nothing. again: the states have already
        advanced by this step; only replace its tokens.
        """
        ...

    def tokens(self, batch: InputBatch, num_rows: int) -> torch.Tensor:
        """Return the token that each of the first `num_rows` rows got, int32; an arbitrary value if it got none."""
        ...


class StepAdvance:
    """Updates the request states after steps in which a request has one row and gets at most one token.

    Implements Advance.
    """

    def __init__(self, states: RequestStates, buffers: InputBuffers) -> None:
        self._states, self._buffers = states, buffers

    def __call__(
        self, batch: InputBatch, token_ids_R: torch.Tensor | None, num_rows: int, *, again: bool = False
    ) -> None:
        if token_ids_R is None:
            token_ids_R = self._buffers.sample_positions_R  # no row gets a token, so any values will do
        decodes_only = batch.decodes_only
        advance(self._states, self._buffers, token_ids_R, num_rows, decodes_only=decodes_only, again=again)

    def tokens(self, batch: InputBatch, num_rows: int) -> torch.Tensor:
        return self._states.last_token_S.index_select(0, self._buffers.rows_R[:num_rows])


def advance(
    states: RequestStates,
    buffers: InputBuffers,
    token_ids_R: torch.Tensor,
    num_rows: int,
    *,
    decodes_only: bool,
    again: bool = False,
) -> None:
    """Store a step's tokens in the states, and write them to the ring buffer that the host reads.

    token_ids_R: int64, for all rows but padding; negative values are error codes. A row gets its token only if the step
    has computed the last known token of the row's request. again: the states have already advanced by this step; only
    replace its tokens.
    """
    if buffers.rows_R.device.type == "cpu":
        advance_reference(states, buffers, token_ids_R, num_rows, decodes_only=decodes_only, again=again)
    else:
        launch_advance(states, buffers, token_ids_R, num_rows, decodes_only, again)


def launch_advance(
    states: RequestStates,
    buffers: InputBuffers,
    token_ids_R: torch.Tensor,
    num_rows: int,
    decodes_only: bool,
    again: bool,
) -> None:
    from compiled_engine.engine.step_kernels import advance_kernel  # Triton is not installed everywhere

    advance_kernel[(1,)](
        buffers.rows_R,
        buffers.query_start_loc_R1,
        token_ids_R,
        states.num_computed_S,
        states.prefill_len_S,
        states.last_token_S,
        buffers.num_steps_1,
        buffers.tokens_KR1,
        num_rows,
        buffers.tokens_KR1.stride(0),
        RING=RING,
        LAST_NUMBER=LAST_NUMBER,
        DECODES_ONLY=decodes_only,
        AGAIN=again,
        TILE_R=next_power_of_2(buffers.rows_R.shape[0]),
        num_warps=4,
        **dependent_launch(buffers.rows_R.device),
    )


def advance_reference(
    states: RequestStates,
    buffers: InputBuffers,
    token_ids_R: torch.Tensor,
    num_rows: int,
    *,
    decodes_only: bool,
    again: bool,
) -> None:
    """Do the work of step_kernels.advance_kernel on a CPU, with numpy."""
    rows_R = buffers.rows_R.numpy()[:num_rows]
    real_R = rows_R >= 0
    rows = rows_R[real_R]
    starts_R1 = np.arange(num_rows + 1) if decodes_only else buffers.query_start_loc_R1.numpy()[: num_rows + 1]
    lens_R = np.diff(starts_R1)
    computed_S = states.num_computed_S.numpy()
    if not again:
        computed_S[rows] += lens_R[real_R]
    samples_R = np.zeros(num_rows, bool)
    samples_R[real_R] = computed_S[rows] >= states.prefill_len_S.numpy()[rows]
    tokens_R = np.full(num_rows, -1, np.int32)
    tokens_R[samples_R] = token_ids_R.numpy()[np.flatnonzero(samples_R)]
    # An error code ends its request, but another of its steps may be in flight.
    states.last_token_S.numpy()[rows_R[samples_R]] = np.maximum(tokens_R[samples_R], 0)
    number = (int(buffers.num_steps_1[0]) + 1) & LAST_NUMBER
    buffers.num_steps_1[0] = number
    ring_row = buffers.tokens_KR1.numpy()[number % RING]
    ring_row[0] = number
    ring_row[1 : num_rows + 1] = tokens_R


class TokenRing:
    """The host's side of the ring buffer of tokens: counts writes, to find the entry of each step.

    The device numbers its writes to the ring buffer, and the host counts the launches that write. A step that is
    sampled again writes a second entry, which has its final tokens. The ring has room for two entries per pending step.
    """

    def __init__(self, buffers: InputBuffers, device: torch.device, clock: StepClock):
        self._buffers, self._device, self._clock = buffers, device, clock
        self._ring_KR1 = buffers.tokens_KR1.numpy()
        self._number = 0
        self._is_known = False  # _number equals the device's number

    def launched(self) -> None:
        """Count a launch that writes an entry of the ring buffer."""
        self._number = (self._number + 1) & LAST_NUMBER

    def lose_count(self) -> None:
        """Record that the host's count may differ from the device's, after a failure."""
        self._is_known = False

    def catch_up(self) -> None:
        """Read the count from the device if the host's may differ. This waits for the device."""
        if not self._is_known:
            self._number = int(self._buffers.num_steps_1)
            self._is_known = True

    def pending_step(
        self, batch: InputBatch, logprobs: BatchLogprobs | None, results: Mapping[str, Deferred]
    ) -> PendingStep:
        """Return the pending step whose tokens the last counted launch writes.

        logprobs: the step's log-probabilities; None if no request asks for any. results: the features' results, by
        name.
        """
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        return PendingStep(self._ring_KR1, self._number, event, batch, logprobs, results, self._clock)


@dataclass(slots=True)
class PendingStep:
    """A launched step, whose result is read when it has ended on the device."""

    _ring_KR1: np.ndarray  # the ring buffer, with the step's tokens under `_number`
    _number: int  # see TokenRing
    _event: torch.cuda.Event | None  # after the step's last launch; None on a CPU
    _batch: InputBatch
    _logprobs: BatchLogprobs | None
    _results: Mapping[str, Deferred]  # features' results, by name
    _clock: StepClock

    def result(self) -> RunnerOutput:
        """Wait for the step to end, and return its output.

        Raises RuntimeError if later steps have overwritten its tokens in the ring buffer.
        """
        if self._event is not None:
            self._event.synchronize()
        self._clock.lap("wait")
        ring_row = self._ring_KR1[self._number % RING]
        if ring_row[0] != self._number:
            raise RuntimeError(f"the tokens of step {self._number} were overwritten by step {ring_row[0]}")
        batch = self._batch
        extras = {name: result.by_request() for name, result in self._results.items()} if self._results else {}
        if batch.combine is not None:
            return batch.combine(batch.request_of_row, ring_row[1 : batch.num_rows + 1], self._logprobs, extras)
        tokens_R, samples_R = ring_row[1 : batch.num_real_rows + 1], batch.samples
        if batch.order is not None:
            tokens_R, samples_R = tokens_R[batch.order], samples_R[batch.order]
        token_ids = tokens_R.tolist()
        if not samples_R.all():
            token_ids = list(compress(token_ids, samples_R.tolist()))
        if self._logprobs is None:
            return RunnerOutput(token_ids, extras=extras)
        few = None
        if self._logprobs.few_SW is not None:
            sampled = np.flatnonzero(samples_R) if batch.order is None else batch.order[samples_R]
            few = LogprobRows.of_array(self._logprobs.few_SW.numpy()[sampled])
        many = {batch.request_of_row[i]: LogprobRows.of_array(row.numpy()) for i, row in self._logprobs.many.items()}
        return RunnerOutput(token_ids, few, many, extras=extras)


@dataclass
class LateStep:
    """A launched step that computes logits, and whose final sampling awaits inputs that the host still computes."""

    batch: InputBatch
    logits_RV: torch.Tensor  # valid until the next step is launched
    results: dict[str, Deferred]
    sampled: PendingStep | None = None  # the pending step, after sampling

    def result(self) -> RunnerOutput:
        """Wait for the step to end, and return its output. Raises RuntimeError if a failure prevented its sampling."""
        if self.sampled is None:
            raise RuntimeError("the step was not sampled: its late inputs did not come")
        return self.sampled.result()


class Deferred(Protocol):
    """Interface of a feature's result for a step, which is being copied to the host."""

    def by_request(self) -> dict[str, Any]:
        """Return each request's result, as plain data by request id. Called once the step has ended on the device."""
        ...
