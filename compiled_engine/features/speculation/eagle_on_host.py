"""Drafts of an EAGLE-3 head, which reads what the model knows of the tokens that are verified.

Here the host knows the tokens, as on a CPU; eagle.py is for devices where it does not.
"""

from __future__ import annotations

import numpy as np
import torch

from compiled_engine.attention.inputs import arguments_of, attention_inputs_of
from compiled_engine.config import EngineConfig
from compiled_engine.features.speculation.draft_rows import stage_numbered
from compiled_engine.features.speculation.eagle_head import load_head
from compiled_engine.features.speculation.ngram import wanted_drafts
from compiled_engine.graphs.compiler.signature import tensors_beside_steps
from compiled_engine.messages import SchedulerOutput
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.models.textbook.eagle3 import FEATURES
from compiled_engine.process.progress import Progress
from compiled_engine.runner.hooks import ModelBeside, RunnerParts, StepFeature
from compiled_engine.runner.input_batch import InputBatch, InputBuffers, empty_batch, prepare, step_of_batch
from compiled_engine.runner.model_forward import ForwardOutput, threads_for_step
from compiled_engine.runner.warm_up import start_up_batches
from compiled_engine.sampling.sampler import SamplerClass


class EagleOnHost(StepFeature):
    """Drafts of a head, sampled with the parameters and the noise of the request, as DraftModel does.

    The head has a KV cache of its own under the block tables of the requests. Its entry of a position comes of the
    model's hidden states there and of the token behind. When a step has its tokens, `prefill_head` computes all that it
    has verified: prompts, newest tokens, and drafts that were right, whose entries of the time when they were drafted
    it replaces. So where a block is in the prefix cache, the head's entries are there too; only the last one may belong
    to another token behind the block, which makes drafts worse, but no token wrong. `propose` samples the first draft
    of the state that is left, and each further pass computes the drafts of the pass before, with the head's own hidden
    states for what the model has not seen.
    """

    def __init__(self, config: EngineConfig, parts: RunnerParts) -> None:
        """config: of the head. Raises what the compiler and the loader raise."""
        self._config, self._states, self._sampler, self._steps = config, parts.states, parts.sampler, parts.buffers
        self._head = head = load_head(config, parts, build_model, None)
        self._aux_hidden_states: tuple[torch.Tensor, ...] = ()  # of the last step, [T, target_size] each
        states = self._states
        self.compiled, self.model, self.kv_caches = head.compiled, head.model, head.kv_caches
        self._token_ids_V, self._num_parameters = head.token_ids_V, head.num_parameters
        scheduler, blocks = config.scheduler, states.block_table_SB.shape[1]
        most_tokens = scheduler.max_num_batched_tokens
        self._buffers = InputBuffers(
            most_tokens,
            scheduler.max_num_seqs + 1,
            blocks,
            states.writes,
            config.device,
            asked=tensors_beside_steps(config),
            numbered=True,
        )
        self._features_TD = next(tensor for name, _, tensor in self._buffers.step[""] if name == FEATURES)
        num_rows = states.num_computed_S.shape[0]
        # The head's newest hidden state of each row.
        self._hidden_SD = torch.zeros(num_rows, config.model.hidden_size, dtype=config.model.dtype)

    def allocate(self, num_blocks: int) -> None:
        """Replace the KV cache by one of num_blocks blocks."""
        self._head.allocate(num_blocks)

    def close(self) -> None:
        """Drop the last references to the weights and the cache."""
        self._head.close()

    @property
    def models(self) -> tuple[ModelBeside, ...]:
        return (ModelBeside("draft ", self.compiled, self.model),)

    def failed(self) -> None:
        self._buffers.forget_staged()

    def start_up(self, progress: Progress) -> int:
        for shape in start_up_batches(self._config):
            batch = empty_batch(self._buffers, shape.num_tokens, shape.num_requests, shape.host_3)
            self._states.writes.apply()
            prepare(batch, self._states, self._buffers)
            self._forward(batch)
        return 0

    def in_forward(self, batch: InputBatch, output: ForwardOutput) -> None:
        """Keep the hidden states that the head reads."""
        self._aux_hidden_states = output.aux_hidden_states

    def after_step(self, batch: InputBatch) -> None:
        if batch.numbered:
            self.prefill_head(batch)

    def prefill_head(self, batch: InputBatch) -> None:
        """Compute the tokens of a step that are verified."""
        states, buffers, aux_hidden_states = self._states, self._steps, self._aux_hidden_states
        rows_T = np.repeat(batch.rows, np.diff(batch.query_starts))
        positions_T = buffers.positions_T.numpy()[: batch.num_tokens]
        verified_T = (rows_T >= 0) & (positions_T < states.num_computed_S.numpy()[rows_T])
        places = np.flatnonzero(verified_T)  # those of a request follow one another
        if len(places) == 0:
            return
        rows_T, positions_T = rows_T[places], positions_T[places]
        begins_A = np.flatnonzero(np.diff(rows_T, prepend=-1))
        rows_A, lens_A = rows_T[begins_A], np.diff(begins_A, append=len(rows_T))
        order_A = np.argsort(lens_A > 1, kind="stable")
        order_T = np.argsort(np.repeat(np.argsort(order_A), lens_A), kind="stable")
        token_ids_T = states.all_token_ids_KL.numpy()[states.token_row_S.numpy()[rows_T], positions_T + 1]
        with threads_for_step(len(rows_T), self._num_parameters, self._config.device):
            index_T = torch.from_numpy(places[order_T])
            features_TD = self.model.combine(
                torch.cat([states_TD.index_select(0, index_T) for states_TD in aux_hidden_states], dim=-1)
            )
            rows_A, lens_A = rows_A[order_A], lens_A[order_A]
            self._pass(rows_A, -lens_A, lens_A, token_ids_T[order_T], features_TD)

    def begin(self, step: SchedulerOutput) -> None:
        """Write the drafts of the step's requests into the states."""
        if not step.skips_head:
            self.propose(step)

    def propose(self, step: SchedulerOutput) -> None:
        """Write the drafts of the step's requests into the states. The requests have their rows and blocks."""
        states = self._states
        assert states.ahead_SK is not None
        ahead_SK = states.ahead_SK.numpy()
        rows_R = states.rows(step.request_ids)
        wanted_R = wanted_drafts(step, states, rows_R)
        ahead_SK[rows_R[wanted_R > 0]] = -1
        for draft in range(int(wanted_R.max(initial=0))):
            rows_A = rows_R[wanted_R > draft]
            with threads_for_step(len(rows_A), self._num_parameters, self._config.device):
                if draft:
                    ones_A, features_AD = np.ones_like(rows_A), self._hidden_SD[torch.from_numpy(rows_A)]
                    self._pass(rows_A, (draft - 1) * ones_A, ones_A, ahead_SK[rows_A, draft - 1], features_AD)
                ahead_SK[rows_A, draft] = self._sample(rows_A, draft, step.draft_sharpness)

    def _pass(
        self,
        rows_A: np.ndarray,
        number_A: np.ndarray,
        lens_A: np.ndarray,
        token_ids_T: np.ndarray,
        features_TD: torch.Tensor,
    ) -> None:
        """Run the head on rows that begin `number_A` tokens behind the newest one, those of one token first, and keep
        the last hidden state of each. token_ids_T: behind each position."""
        states, buffers = self._states, self._buffers
        starts_A = states.num_computed_S.numpy()[rows_A]
        batch = stage_numbered(
            buffers, [""] * len(rows_A), rows_A, number_A, lens_A, starts_A, np.ones(len(rows_A), bool)
        )
        states.writes.apply()
        prepare(batch, states, buffers)
        buffers.input_ids_T.numpy()[: batch.num_tokens] = token_ids_T
        self._features_TD[: batch.num_tokens] = features_TD
        hidden_TD = self._forward(batch)
        ends_A = torch.from_numpy(batch.query_starts[1:] - 1)
        self._hidden_SD[torch.from_numpy(rows_A)] = hidden_TD[ends_A]

    def _forward(self, batch: InputBatch) -> torch.Tensor:
        step = step_of_batch(batch, self._buffers)
        inputs = attention_inputs_of(step, self._config.attention_backend)
        return self.model.run(batch.padded_tokens, arguments_of(step, inputs, self.kv_caches)).tensor

    def _sample(self, rows_A: np.ndarray, draft: int, sharpness: float) -> np.ndarray:
        """Sample draft `draft` of these rows as step_sampling.py does for the engine's model, from `sharpness` times
        the logits: a token that the head does not know is never chosen."""
        vocabulary, index_A = self._sampler.vocabulary, torch.from_numpy(rows_A)
        logits_AV = torch.full((len(rows_A), self._config.model.vocab_size), -torch.inf)
        logits_AV[:, self._token_ids_V] = sharpness * self.model.logits(self._hidden_SD[index_A]).float()
        logits_AV = logits_AV[:, vocabulary.first : vocabulary.first + vocabulary.size].contiguous()
        positions_A = torch.from_numpy(self._states.num_computed_S.numpy()[rows_A].astype(np.int64) + 1 + draft)
        if self._sampler.sampler_class(rows_A) is SamplerClass.GENERAL:
            tokens_A = self._sampler.sample(logits_AV, rows_A, index_A, positions_A)
        else:
            tokens_A = torch.empty(len(rows_A), dtype=torch.int64)
            self._sampler.sample_by_temperature(logits_AV, index_A, positions_A, tokens_A)
        return tokens_A.clamp(min=0).numpy()
