"""What comes after a step's logits: tokens for rows that ask for more than temperature and seed, log-probabilities."""

from __future__ import annotations

import numpy as np
import torch

from compiled_engine.messages import TokenMasks
from compiled_engine.rows.async_copies import upload
from compiled_engine.runner.advance import advance
from compiled_engine.runner.input_batch import InputBatch, masks_of_batch
from compiled_engine.runner.input_buffers import InputBuffers
from compiled_engine.runner.pending_steps import PendingStep, PendingSteps, UnsampledStep
from compiled_engine.runner.request_states import RequestStates
from compiled_engine.runner.stage_traffic import StageTraffic
from compiled_engine.sampling.edits import StepMasks
from compiled_engine.sampling.logprobs import BatchLogprobs, batch_logprobs
from compiled_engine.sampling.sampler import Sampler, SamplerClass


class StepSampling:
    """Launches it; nothing waits for the device. traffic: hands the tokens on, in the last stage of a pipeline."""

    def __init__(
        self,
        sampler: Sampler,
        states: RequestStates,
        buffers: InputBuffers,
        pending: PendingSteps,
        device: torch.device,
        traffic: StageTraffic | None = None,
    ):
        self._sampler, self._states, self._buffers = sampler, states, buffers
        self._pending, self._device, self._traffic = pending, device, traffic

    def finish(self, step: UnsampledStep, masks: TokenMasks | None = None) -> PendingStep:
        """Of a step whose rows were all sampled by temperature and seed; masks: those that it awaits, if any."""
        batch, logits_RV = step.batch, step.logits_RV
        rows_R = np.where(batch.samples, batch.rows, -1)
        if self._sampler.sampler_class(rows_R) is SamplerClass.GENERAL:
            self._sample_generally(batch, rows_R, logits_RV, masks)
        if self._traffic:
            self._traffic.send_tokens(batch)
        return self._pending.step(batch, self._logprobs(batch, rows_R, logits_RV), step.prompt)

    def _sample_generally(
        self, batch: InputBatch, rows_R: np.ndarray, logits_RV: torch.Tensor, masks: TokenMasks | None
    ) -> None:
        """Other tokens for those that sample, rows_R."""
        count = batch.num_requests
        row_index_R = self._buffers.rows_R[:count]
        if not batch.samples.all():
            row_index_R = upload(rows_R.astype(np.int32), self._device)
        positions_R = self._buffers.sample_positions_R[:count]
        step_masks = None
        if masks is not None and masks.request_ids:
            words_MW, index_R = masks_of_batch(masks, batch.request_ids)
            step_masks = StepMasks.of(self._sampler.vocabulary.own_words(words_MW), index_R, self._device)
        token_ids_R = self._sampler.sample(logits_RV[:count], rows_R, row_index_R, positions_R, step_masks)
        decodes_only = batch.decodes_only
        advance(self._states, self._buffers, token_ids_R, batch.num_rows, decodes_only=decodes_only, again=True)
        self._pending.launched()

    def _logprobs(self, batch: InputBatch, rows_R: np.ndarray, logits_RV: torch.Tensor) -> BatchLogprobs | None:
        """Of the tokens that the states have now, where they are asked for."""
        num_logprobs_R = self._sampler.num_logprobs(rows_R)
        if num_logprobs_R is None:
            return None
        count = batch.num_requests
        token_ids_R = self._states.last_token_S.index_select(0, self._buffers.rows_R[:count])
        return batch_logprobs(logits_RV[:count], token_ids_R, num_logprobs_R, vocabulary=self._sampler.vocabulary)
