"""Samples a step, from its hidden states to its tokens. All launches are here, in this order:

  1. The logits of the rows that sample, and a token for each by temperature and seed. The states advance, and the
     tokens go to the host. A graph of decodes ends with this (`launch_captured`); for another batch it follows the
     forward (`launch_rest`). A step that samples nothing (a chunk of a prompt, or a step with another tail) only
     advances (`StepAdvance.without_tokens`).
  2. Once the masks arrive, if the step has any: new tokens for rows with more parameters than temperature and seed, in
     the order of sampler.py. They replace the first tokens in the states and on the host (`complete`).
  3. The log-probabilities of the tokens, if requested.

If the vocabulary is sharded, each of these exchanges a few numbers between ranks. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from compiled_engine.messages import TokenMasks
from compiled_engine.rows.staged_writes import upload
from compiled_engine.runner.input_batch import InputBatch, InputBuffers, masks_of_batch
from compiled_engine.runner.model_forward import ForwardOutput, ModelForward
from compiled_engine.runner.pending_steps import Deferred, PendingSteps, advance
from compiled_engine.runner.request_states import RequestStates
from compiled_engine.sampling.edits import StepMasks
from compiled_engine.sampling.logprobs import BatchLogprobs, batch_logprobs
from compiled_engine.sampling.sampler import Sampler, SamplerClass


class StepAdvance:
    """Takes what a step has sampled into the states, and into the ring that the host reads.

    of_several: does so where rows have numbers: takes the sampled tokens, int64 [R], and the number of rows, and writes
    each row's token to taken_R. A feature sets it.
    """

    of_several: Callable[[torch.Tensor, int], None] | None = None

    def __init__(self, states: RequestStates, buffers: InputBuffers) -> None:
        self._states, self._buffers = states, buffers

    def __call__(self, batch: InputBatch, token_ids_R: torch.Tensor, num_rows: int, *, again: bool = False) -> None:
        """Launch it for the first num_rows rows. again: other tokens replace those that the states advanced with."""
        if batch.numbered:
            assert self.of_several is not None
            self.of_several(token_ids_R, num_rows)
            return
        decodes_only = batch.decodes_only
        advance(self._states, self._buffers, token_ids_R, num_rows, decodes_only=decodes_only, again=again)

    def without_tokens(self, batch: InputBatch, num_rows: int) -> None:
        """Advance the states of a step without sampled tokens; may be captured."""
        self(batch, self._buffers.sample_positions_R, num_rows)  # no row gets a token, so any values will do

    def tokens(self, batch: InputBatch, num_rows: int) -> torch.Tensor:
        """Return the token that each of the first num_rows rows has got, int32."""
        if batch.numbered:
            return self._buffers.taken_R[:num_rows]
        return self._states.last_token_S.index_select(0, self._buffers.rows_R[:num_rows])


class StepSampling:
    """The `Tail` of a runner that samples: logits, and a token per sampling row. Nothing waits for the device."""

    def __init__(
        self,
        model: ModelForward,
        sampler: Sampler,
        buffers: InputBuffers,
        pending: PendingSteps,
        advance: StepAdvance,
    ):
        self._model, self.sampler, self._buffers = model, sampler, buffers
        self._pending, self.advance = pending, advance

    def launch_rest(
        self, batch: InputBatch, output: ForwardOutput, results: dict[str, Deferred]
    ) -> torch.Tensor | None:
        return output.tensor if batch.has_decode_graph else self.sample(output, batch)

    def sample(self, output: ForwardOutput, batch: InputBatch) -> torch.Tensor | None:
        """Launch part 1 for a batch without a graph of decodes; returns its logits [R, V], None if nothing samples."""
        count = batch.num_requests  # padding rows need no logits here
        if not batch.samples.any():
            self.advance.without_tokens(batch, count)
            return None
        if len(output.tensor) != count:  # otherwise each token is a row, and nothing has to be gathered
            every = batch.num_tokens == count
            output = output.of_tokens(slice(count) if every else self._buffers.logits_index_R[:count])
        return self.launch_captured(output, batch, count)

    def launch_captured(self, output: ForwardOutput, batch: InputBatch, num_rows: int) -> torch.Tensor:
        """Choose a token for each of num_rows rows by temperature and seed, and advance; returns the rows' logits.

        May be captured. output: of these rows alone.
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
        self, batch: InputBatch, logits_RV: torch.Tensor, masks: TokenMasks | None = None
    ) -> BatchLogprobs | None:
        """Launch parts 2 and 3 after part 1; returns the log-probabilities, if any are requested. masks: the step's."""
        rows_R = np.where(batch.samples, batch.rows, -1)
        if self.sampler.sampler_class(rows_R) is SamplerClass.GENERAL:
            self._sample_generally(batch, rows_R, logits_RV, masks)
        return self._logprobs(batch, rows_R, logits_RV)

    def _sample_generally(
        self, batch: InputBatch, rows_R: np.ndarray, logits_RV: torch.Tensor, masks: TokenMasks | None
    ) -> None:
        count, device = batch.num_requests, logits_RV.device
        row_index_R = self._buffers.rows_R[:count]
        if not batch.samples.all():
            row_index_R = upload(rows_R.astype(np.int32), device)
        positions_R = self._buffers.sample_positions_R[:count]
        step_masks = None
        if masks is not None and masks.request_ids:
            words_MW, index_R = masks_of_batch(masks, batch.request_ids)
            step_masks = StepMasks.of(self.sampler.vocabulary.own_words(words_MW), index_R, device)
        token_ids_R = self.sampler.sample(logits_RV[:count], rows_R, row_index_R, positions_R, step_masks)
        self.advance(batch, token_ids_R, batch.num_rows, again=True)
        self._pending.launched()

    def _logprobs(self, batch: InputBatch, rows_R: np.ndarray, logits_RV: torch.Tensor) -> BatchLogprobs | None:
        num_logprobs_R = self.sampler.num_logprobs(rows_R)
        if num_logprobs_R is None:
            return None
        count = batch.num_requests
        token_ids_R = self.advance.tokens(batch, count)
        return batch_logprobs(logits_RV[:count], token_ids_R, num_logprobs_R, vocabulary=self.sampler.vocabulary)
