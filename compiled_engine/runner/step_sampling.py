"""Sample a step, from its hidden states to its tokens: all launches are here, in this order.

1. The log-probabilities of prompts, from hidden states (`prompt_logprobs`).
2. The logits of the rows that sample, and a token for each by temperature and seed; the states advance, and the tokens
   go to the host (`sample`). The graph of a batch of decodes ends with this, see GraphedStep (`sample_all`). A step
   that samples nothing (a chunk of a prompt, or a stage of a pipeline before the last) only advances
   (`without_tokens`).
3. After the masks arrive, if the step has any: new tokens for rows with more than temperature and seed, in the order of
   sampler.py. They replace the first tokens in the states and on the host (`complete`).
4. In a pipeline, the transfer of tokens to the first stage.
5. The log-probabilities of the tokens, if requested.

Where the vocabulary is divided among ranks, 1, 2, 3 and 5 exchange a few numbers. Nothing waits for the device.
"""

from __future__ import annotations

import numpy as np
import torch

from compiled_engine.config import SpeculationConfig
from compiled_engine.messages import SchedulerOutput, TokenMasks
from compiled_engine.rows.staged_writes import upload
from compiled_engine.runner.drafts import Acceptance, verify
from compiled_engine.runner.input_batch import InputBatch, InputBuffers, masks_of_batch
from compiled_engine.runner.model_forward import ForwardOutput, ModelForward
from compiled_engine.runner.pending_steps import PendingStep, PendingSteps, PromptLogprobs, UnsampledStep, advance
from compiled_engine.runner.request_states import RequestStates
from compiled_engine.runner.stage_traffic import StageTraffic
from compiled_engine.sampling.edits import StepMasks
from compiled_engine.sampling.logprobs import BatchLogprobs, batch_logprobs, logprob_rows
from compiled_engine.sampling.sampler import Sampler, SamplerClass

NO_DRAFTS = SpeculationConfig()
# Positions of a prompt whose logits are computed at once.
CHUNK = 256


def owes_prompt_logprobs(step: SchedulerOutput, states: RequestStates) -> bool:
    """Return whether a request of the step computes its prompt and needs log-probabilities of the prompt's tokens."""
    rows = states.prompt_logprobs
    return bool(rows) and any(
        (row := states.row(request_id)) in rows and start < states.num_prompt_tokens[row] - 1
        for request_id, start in zip(step.request_ids, step.starts, strict=True)
    )


class StepSampling:
    """Launch post-logits sampling asynchronously. traffic: sends the tokens, in the last stage of a pipeline."""

    def __init__(
        self,
        model: ModelForward,
        sampler: Sampler,
        states: RequestStates,
        buffers: InputBuffers,
        pending: PendingSteps,
        traffic: StageTraffic | None = None,
        speculation: SpeculationConfig = NO_DRAFTS,
    ):
        self._model, self.sampler, self._states, self._buffers = model, sampler, states, buffers
        self._pending, self._traffic, self._speculates = pending, traffic, speculation.num_tokens > 0
        self._acceptance = Acceptance(speculation.acceptance_rates, buffers.rows_R.device)

    def prompt_logprobs(self, batch: InputBatch, hidden: ForwardOutput) -> dict[str, PromptLogprobs]:
        """Compute those of the tokens after this step's, for the requests that want them and are in their prompt."""
        found: dict[str, PromptLogprobs] = {}
        states, vocabulary = self._states, self.sampler.vocabulary
        for i, request_id in enumerate(batch.request_ids):
            row = int(batch.rows[i])
            wanted = states.prompt_logprobs.get(row)
            first, start = int(batch.num_computed[i]), int(batch.query_starts[i])
            in_step, in_prompt = int(batch.query_starts[i + 1]) - start, int(states.num_prompt_tokens[row])
            count = min(in_step, in_prompt - 1 - first)
            if wanted is None or count <= 0:
                continue
            targets_T = upload(states.all_token_ids(row)[first + 1 : first + 1 + count], hidden.tensor.device)
            chunks = []
            for begin in range(0, count, CHUNK):
                end = min(count, begin + CHUNK)
                logits_TV = self._model.logits_of(hidden.of_tokens(slice(start + begin, start + end)))
                num_top = vocabulary.whole_size if wanted == -1 else wanted
                chunks.append(logprob_rows(logits_TV, targets_T[begin:end], num_top, vocabulary=vocabulary))
            found[request_id] = PromptLogprobs(first + 1, chunks)
        return found

    def sample(self, output: ForwardOutput, batch: InputBatch) -> torch.Tensor | None:
        """Launch 2 for a batch that had no graph of decodes; returns its logits [R, V], None if nothing is sampled."""
        count = batch.num_requests  # padding rows need no logits here
        if not batch.samples.any():
            self.without_tokens(batch, count)
            return None
        if len(output.tensor) != count:  # else each token is a row's: nothing has to be picked out, and copied
            every = batch.num_tokens == count
            output = output.of_tokens(slice(count) if every else self._buffers.logits_index_R[:count])
        return self.sample_all(output, batch, count)

    def sample_all(self, output: ForwardOutput, batch: InputBatch, num_rows: int) -> torch.Tensor:
        """Choose a token for each of num_rows rows by temperature and seed, and advance; may be captured.

        output: of these rows alone. Returns their logits.
        """
        logits_RV = self._model.logits_of(output)
        rows = slice(0, num_rows)
        token_ids_R = torch.empty(num_rows, dtype=torch.int64, device=logits_RV.device)
        row_index_R, positions_R = self._buffers.rows_R[rows], self._buffers.sample_positions_R[rows]
        own_RV = logits_RV.float() if logits_RV.device.type == "cpu" else logits_RV
        self.sampler.sample_by_temperature(own_RV[rows], row_index_R, positions_R, token_ids_R)
        self._advance(batch, token_ids_R, num_rows)
        return logits_RV

    def without_tokens(self, batch: InputBatch, num_rows: int) -> None:
        """Advance the states of a step that samples nothing here; may be captured."""
        self._advance(batch, self._buffers.sample_positions_R, num_rows)  # no row is to get a token: any will do

    def resample(self, batch: InputBatch, token_ids_R: torch.Tensor, num_rows: int) -> None:
        """Replace the tokens that the states have advanced with."""
        self._advance(batch, token_ids_R, num_rows, again=True)

    def _advance(self, batch: InputBatch, token_ids_R: torch.Tensor, num_rows: int, *, again: bool = False) -> None:
        if self._speculates and not batch.no_head:
            verify(self._states, self._buffers, token_ids_R, num_rows, self._acceptance)
            return
        decodes_only = batch.decodes_only
        advance(self._states, self._buffers, token_ids_R, num_rows, decodes_only=decodes_only, again=again)

    def complete(self, step: UnsampledStep, masks: TokenMasks | None = None) -> PendingStep:
        """Launch 3 to 5 for a step after 2. masks: the step's masks, if any."""
        batch, logits_RV = step.batch, step.logits_RV
        rows_R = np.where(batch.samples, batch.rows, -1)
        if self.sampler.sampler_class(rows_R) is SamplerClass.GENERAL:
            self._sample_generally(batch, rows_R, logits_RV, masks)
        if self._traffic:
            self._traffic.send_tokens(batch)
        return self._pending.step(batch, self._logprobs(batch, rows_R, logits_RV), step.prompt)

    def _sample_generally(
        self, batch: InputBatch, rows_R: np.ndarray, logits_RV: torch.Tensor, masks: TokenMasks | None
    ) -> None:
        """Sample new tokens for rows_R."""
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
        self.resample(batch, token_ids_R, batch.num_rows)
        self._pending.launched()

    def _logprobs(self, batch: InputBatch, rows_R: np.ndarray, logits_RV: torch.Tensor) -> BatchLogprobs | None:
        """Log-probabilities of the tokens that the step has, if requested."""
        num_logprobs_R = self.sampler.num_logprobs(rows_R)
        if num_logprobs_R is None:
            return None
        count = batch.num_requests
        if batch.no_head or not self._speculates:
            token_ids_R = self._states.last_token_S.index_select(0, self._buffers.rows_R[:count])
        else:
            token_ids_R = self._buffers.taken_R[:count]
        return batch_logprobs(logits_RV[:count], token_ids_R, num_logprobs_R, vocabulary=self.sampler.vocabulary)
