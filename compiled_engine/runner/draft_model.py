"""Drafts of a smaller model of the same vocabulary."""

from __future__ import annotations

import numpy as np
import torch

from compiled_engine.attention.inputs import arguments_of, attention_inputs_of
from compiled_engine.config import EngineConfig, GraphMode
from compiled_engine.graphs.compiled_model import CompiledModel
from compiled_engine.graphs.compiler.signature import tensors_beside_steps
from compiled_engine.messages import SchedulerOutput
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.parallel.group import Group
from compiled_engine.process.progress import Progress
from compiled_engine.process.timeline import Timeline
from compiled_engine.runner import kv_cache
from compiled_engine.runner.drafts import stage_numbered
from compiled_engine.runner.input_batch import InputBatch, InputBuffers, empty_batch, prepare, step_of_batch
from compiled_engine.runner.model_forward import (
    ForwardOutput,
    ModelForward,
    compile_in_turn,
    load_model,
    threads_for_step,
)
from compiled_engine.runner.ngram import wanted_drafts
from compiled_engine.runner.request_states import RequestStates
from compiled_engine.runner.warm_up import start_up_batches
from compiled_engine.sampling.sampler import Sampler, SamplerClass


class DraftModelProposer:
    """Drafts of a smaller model (Leviathan, Kalman and Matias, "Fast inference from transformers via speculative
    decoding", 2023), sampled with the parameters and the noise of the request.

    The same noise makes two models choose the same token far more often than if each had its own (Daliri, Musco and
    Suresh, "Coupling without communication and drafter-invariant speculative decoding", 2024), and two equal models
    always.

    The model has a KV cache of its own under the block tables of the requests. It computes what the engine's model
    does, in the same step: a first pass takes the tokens of the step that are known, prompts included, and each
    further pass the drafts of the pass before. K and V of a step's last draft are missing if the draft was right: the
    next first pass computes that token too. If the request ends or is preempted before that, a block in the prefix
    cache may lack them, which makes later drafts worse, but no token wrong.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_drafts: int,
        states: RequestStates,
        sampler: Sampler,
        group: Group,
        progress: Progress,
        timeline: Timeline,
    ) -> None:
        """config: of the draft model. Raises what the compiler and the loader raise."""
        self._config, self._states, self._sampler = config, states, sampler
        self.compiled: CompiledModel | None = None
        if config.compile.enabled:
            self.compiled = compile_in_turn(config, group, build_model, progress, timeline)
        with timeline.span("load weights"):
            model, named = load_model(config, self.compiled, group, progress)
        self._num_parameters = sum(parameter.numel() for parameter in model.parameters() if not parameter.is_meta)
        scheduler, recorded = config.scheduler, config.graph.mode is GraphMode.RECORDED
        most_tokens, most_rows = scheduler.max_num_batched_tokens, scheduler.max_num_seqs * (1 + num_drafts) + 1
        self.model = ModelForward(model, self.compiled, named, None, most_tokens, recorded)
        self._buffers = InputBuffers(
            most_tokens,
            most_rows,
            states.block_table_SB.shape[1],
            states.writes,
            config.device,
            asked=tensors_beside_steps(config),
            has_drafts=True,
        )
        self.kv_caches = kv_cache.allocate(config, 1)
        self._num_cached = np.zeros(states.num_computed_S.shape[0], np.int64)

    def allocate(self, num_blocks: int) -> None:
        """Replace the KV cache by one of num_blocks blocks."""
        self.kv_caches[:] = kv_cache.allocate(self._config, num_blocks)

    def close(self) -> None:
        """Drop the last references to the weights and the cache."""
        self.kv_caches.clear()
        self.model.close()

    def warm_up(self) -> None:
        """Run every kind of batch once, without a trace."""
        for shape in start_up_batches(self._config):
            batch = empty_batch(self._buffers, shape.num_tokens, shape.num_requests, shape.host_3)
            self._states.writes.apply()
            self._forward(batch)

    def propose(self, step: SchedulerOutput) -> None:
        """See NgramProposer.propose."""
        states = self._states
        rows_R = states.rows(step.request_ids)
        wanted_R = wanted_drafts(step, states, rows_R)
        computed_R, starts_R = states.num_computed_S.numpy()[rows_R], np.array(step.starts)
        counts_R = np.where(starts_R >= states.num_known[rows_R] - 1, 1, step.counts)
        new = {request.request_id for request in step.new}
        lacks_R = ~np.array([each in new for each in step.request_ids]) & (self._num_cached[rows_R] < computed_R)
        # Of each row [row, number, tokens, wanted drafts]: what is missing comes before the newest tokens and prompts.
        missing = np.stack((rows_R, np.full_like(rows_R, -1), np.ones_like(rows_R), np.zeros_like(rows_R)), 1)[lacks_R]
        missing = missing[: self._config.scheduler.max_num_batched_tokens - counts_R.sum()]
        known = np.stack((rows_R, np.zeros_like(rows_R), counts_R, wanted_R), 1)
        known = known[np.argsort(counts_R > 1, kind="stable")]
        self._pass(np.concatenate((missing, known)), draft=0)
        self._num_cached[rows_R] = computed_R + counts_R + np.maximum(wanted_R - 1, 0)
        for draft in range(1, int(wanted_R.max(initial=0))):
            rows = rows_R[wanted_R > draft]
            ones = np.ones_like(rows)
            self._pass(np.stack((rows, draft * ones, ones, ones), 1), draft)

    def _pass(self, rows_A4: np.ndarray, draft: int) -> None:
        """Run the model on rows of [row, number, tokens, drafts wanted], and sample draft `draft` where one is."""
        states, buffers = self._states, self._buffers
        assert states.drafts_SK is not None
        rows_A, number_A, lens_A, wanted_A = rows_A4.astype(np.int32).T
        starts_A = states.num_computed_S.numpy()[rows_A]
        batch = stage_numbered(buffers, [""] * len(rows_A), rows_A, number_A, lens_A, starts_A, wanted_A > 0)
        states.writes.apply()
        with threads_for_step(batch.num_tokens, self._num_parameters, self._config.device):
            output = self._forward(batch)
            drafting = np.flatnonzero(batch.samples)
            if len(drafting) == 0:
                return
            ends = torch.from_numpy(drafting)
            tensor = output.tensor[buffers.logits_index_R[ends]]
            logits_AV = tensor if output.is_logits else self.model.logits(tensor)
            tokens_A = self._sample(logits_AV.float(), rows_A[drafting], buffers.sample_positions_R[ends])
        states.drafts_SK.numpy()[rows_A[drafting], draft] = tokens_A.clamp(min=0).numpy()

    def _forward(self, batch: InputBatch) -> ForwardOutput:
        prepare(batch, self._states, self._buffers)
        step = step_of_batch(batch, self._buffers)
        inputs = attention_inputs_of(step, self._config.attention_backend)
        return self.model.run(batch.padded_tokens, arguments_of(step, inputs, self.kv_caches))

    def _sample(self, logits_AV: torch.Tensor, rows_A: np.ndarray, positions_A: torch.Tensor) -> torch.Tensor:
        """As step_sampling.py does for the engine's model, so that filters hold for drafts too."""
        index_A = torch.from_numpy(rows_A)
        if self._sampler.sampler_class(rows_A) is SamplerClass.GENERAL:
            return self._sampler.sample(logits_AV, rows_A, index_A, positions_A)
        tokens_A = torch.empty(len(rows_A), dtype=torch.int64)
        self._sampler.sample_by_temperature(logits_AV, index_A, positions_A, tokens_A)
        return tokens_A
