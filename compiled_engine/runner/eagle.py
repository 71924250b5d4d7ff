"""Drafts of an EAGLE-3 head, which reads the model's hidden states of verified tokens.

In this module the host knows the tokens, as on a CPU; eagle_drafter.py is for devices where it does not.
"""

from __future__ import annotations

import numpy as np
import torch

from compiled_engine.attention.inputs import arguments_of, attention_inputs_of
from compiled_engine.config import EngineConfig
from compiled_engine.graphs.compiler.signature import tensors_beside_steps
from compiled_engine.messages import SchedulerOutput
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.models.textbook.eagle3 import FEATURES
from compiled_engine.parallel.group import Group
from compiled_engine.process.progress import Progress
from compiled_engine.process.timeline import Timeline
from compiled_engine.runner.drafts import stage_numbered
from compiled_engine.runner.eagle_head import load_head
from compiled_engine.runner.input_batch import InputBatch, InputBuffers, empty_batch, prepare, step_of_batch
from compiled_engine.runner.model_forward import threads_for_step
from compiled_engine.runner.ngram import wanted_drafts
from compiled_engine.runner.request_states import RequestStates
from compiled_engine.runner.warm_up import start_up_batches
from compiled_engine.sampling.sampler import Sampler, SamplerClass


class EagleProposer:
    """Proposes drafts of a head, sampled with the request's parameters and noise, as DraftModelProposer does.

    The head has its own KV cache under the requests' block tables. Its entry at a position is computed from the model's
    hidden states there and the token after it. Once a step's tokens are known, `prefill_head` computes everything that
    the step verified: prompts, newest tokens and accepted drafts, whose entries from drafting it replaces. So a block
    in the prefix cache has the head's entries too. Only the last entry may belong to another token after the block,
    which makes drafts worse but no token wrong. `propose` samples the first draft from the resulting state; each
    further pass computes the previous pass's drafts, with the head's own hidden states in place of the model's.
    """

    def __init__(
        self,
        config: EngineConfig,
        states: RequestStates,
        sampler: Sampler,
        group: Group,
        progress: Progress,
        timeline: Timeline,
        embedding_VD: torch.Tensor | None,
    ) -> None:
        """Load the head of `config`. embedding_VD, exceptions: see load_head."""
        self._config, self._states, self._sampler = config, states, sampler
        self._head = head = load_head(config, group, build_model, None, progress, timeline, embedding_VD)
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
            has_drafts=True,
        )
        self._features_TD = next(tensor for name, _, tensor in self._buffers.step[""] if name == FEATURES)
        num_rows = states.num_computed_S.shape[0]
        # The head's newest hidden state of each row.
        self._hidden_SD = torch.zeros(num_rows, config.model.hidden_size, dtype=config.model.dtype)

    def allocate(self, num_blocks: int) -> None:
        self._head.allocate(num_blocks)

    def close(self) -> None:
        self._head.close()

    def forget_staged(self) -> None:
        """Forget what was staged: it did not reach the device."""
        self._buffers.forget_staged()

    def warm_up(self) -> None:
        """Run every kind of batch once, without side effects."""
        for shape in start_up_batches(self._config):
            batch = empty_batch(self._buffers, shape.num_tokens, shape.num_requests, shape.host_3)
            self._states.writes.apply()
            prepare(batch, self._states, self._buffers)
            self._forward(batch)

    def prefill_head(
        self, batch: InputBatch, buffers: InputBuffers, aux_hidden_states: tuple[torch.Tensor, ...]
    ) -> None:
        """Compute the verified tokens of a step.

        buffers: the step's inputs; its tokens are in the states. aux_hidden_states: the step's, [T, target_size] each.
        """
        states = self._states
        rows_T = np.repeat(batch.rows, np.diff(batch.query_starts))
        positions_T = buffers.positions_T.numpy()[: batch.num_tokens]
        verified_T = (rows_T >= 0) & (positions_T < states.num_computed_S.numpy()[rows_T])
        places = np.flatnonzero(verified_T)  # consecutive for each request
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

    def propose(self, step: SchedulerOutput) -> None:
        """See NgramProposer.propose."""
        states = self._states
        assert states.drafts_SK is not None
        drafts_SK = states.drafts_SK.numpy()
        rows_R = states.rows(step.request_ids)
        wanted_R = wanted_drafts(step, states, rows_R)
        drafts_SK[rows_R[wanted_R > 0]] = -1
        for draft in range(int(wanted_R.max(initial=0))):
            rows_A = rows_R[wanted_R > draft]
            with threads_for_step(len(rows_A), self._num_parameters, self._config.device):
                if draft:
                    ones_A, features_AD = np.ones_like(rows_A), self._hidden_SD[torch.from_numpy(rows_A)]
                    self._pass(rows_A, (draft - 1) * ones_A, ones_A, drafts_SK[rows_A, draft - 1], features_AD)
                drafts_SK[rows_A, draft] = self._sample(rows_A, draft, step.draft_sharpness)

    def _pass(
        self,
        rows_A: np.ndarray,
        number_A: np.ndarray,
        lens_A: np.ndarray,
        token_ids_T: np.ndarray,
        features_TD: torch.Tensor,
    ) -> None:
        """Run the head on rows that begin `number_A` tokens after the newest one; keep each row's last hidden state.

        Rows of one token come first. token_ids_T: the token after each position.
        """
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
        """Sample draft `draft` of these rows, like the engine's model in step_sampling.py; `sharpness` scales logits.

        Tokens outside the head's vocabulary are never chosen.
        """
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
