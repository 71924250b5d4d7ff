"""Drafts of a smaller model of the same vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from compiled_engine.attention.backend import get_backend
from compiled_engine.attention.case import cases_of, planned_together
from compiled_engine.attention.op import OnAttention
from compiled_engine.config import EngineConfig, GraphMode, ModelConfig
from compiled_engine.graphs.compiled_model import CompiledModel
from compiled_engine.graphs.compiler.signature import tensors_beside_steps
from compiled_engine.graphs.cuda_graphs.dispatcher import Dispatcher
from compiled_engine.graphs.cuda_graphs.draft_keys import FIRST, model_keys
from compiled_engine.graphs.cuda_graphs.key import GraphKey
from compiled_engine.messages import SchedulerOutput
from compiled_engine.parallel.group import Group
from compiled_engine.parallel.rank_share import local_model
from compiled_engine.process.progress import Progress
from compiled_engine.process.timeline import Timeline
from compiled_engine.runner import kv_cache
from compiled_engine.runner.drafting_rows import DraftingRows, DraftingSteps
from compiled_engine.runner.drafts import keep_drafts
from compiled_engine.runner.input_batch import (
    NO_GENERATION,
    InputBatch,
    InputBuffers,
    StagedDecodes,
    empty_batch,
    make_batch,
    prepare,
)
from compiled_engine.runner.model_forward import (
    BatchForward,
    ForwardOutput,
    ModelForward,
    compile_in_turn,
    load_model,
    threads_for_step,
)
from compiled_engine.runner.request_states import RequestStates
from compiled_engine.sampling.sampler import Sampler, SamplerClass

NO_ROWS = np.empty(0, np.int32)


@dataclass(frozen=True)
class Drafting:
    """The work of a draft model in a step.

    rows: int32 [R], of the requests that have sampled, those with most room for drafts first. num_drafting: for each
    draft, how many requests have room for it. longest: bound of the contexts. key: of the graph, None without one.
    prompts: what is computed of prompts, None if nothing is. num_tokens: of the first pass.
    """

    rows: np.ndarray
    num_drafting: Sequence[int]
    longest: int
    key: GraphKey | None
    prompts: InputBatch | None
    num_tokens: int


def single_tokens(num_rows: int, query_len: int, longest: int) -> InputBatch:
    """Return a batch of num_rows rows of a token each, of which `query_len` in turn share a request."""
    nothing = np.empty(0, np.int32)
    host = num_rows, query_len, longest
    return InputBatch([], nothing, nothing, [], nothing > 0, num_rows, None, True, num_rows, num_rows, host)


class DraftModelProposer:
    """Drafts of a smaller model (Leviathan, Kalman and Matias, "Fast inference from transformers via speculative
    decoding", 2023), sampled with the parameters and the noise of the request.

    The same noise makes two models choose the same token far more often than if each had its own (Daliri, Musco and
    Suresh, "Coupling without communication and drafter-invariant speculative decoding", 2024), and two equal models
    always.

    The model has a KV cache of its own under the block tables of the requests. In each step it computes what the
    engine's model does, before it: a first pass takes the newest token of each request that has sampled, and the token
    before that, since no pass has computed a step's last draft, which may have been right. Each further pass takes the
    drafts of the pass before. Prompts are read after these passes. If a request ends or is preempted, a block in the
    prefix cache may lack K and V of a last draft, which makes later drafts worse, but no token wrong.

    query_lens: rows of a request in its passes, but for one.

    Implements `GraphStep`: a graph holds all passes over a number of requests. A pass depends on the device alone: a
    request without room for a draft is padding in the passes behind it. Drafts in a graph are sampled by temperature
    alone; elsewhere the request's filters count too.
    """

    query_lens = (FIRST,)

    def __init__(
        self,
        config: EngineConfig,
        lengths: Sequence[int],
        states: RequestStates,
        sampler: Sampler,
        group: Group,
        model_to_trace: Callable[[ModelConfig], nn.Module],
        on_attention: OnAttention | None,
        progress: Progress,
        timeline: Timeline,
    ) -> None:
        """config: of the draft model. lengths: the numbers of drafts that steps may have, ascending. Raises what the
        compiler and the loader raise."""
        self.config, self._states, self._sampler = config, states, sampler
        self._lengths, self._num_drafts = lengths, lengths[-1]
        self.compiled: CompiledModel | None = None
        if config.compile.enabled:
            self.compiled = compile_in_turn(config, group, model_to_trace, progress, timeline)
        with timeline.span("load weights"):
            model, named = load_model(config, self.compiled, group, progress)
        self._num_parameters = sum(parameter.numel() for parameter in model.parameters() if not parameter.is_meta)
        scheduler, recorded = config.scheduler, config.graph.mode is GraphMode.RECORDED
        most_requests, most_tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        self.model = ModelForward(model, self.compiled, named, on_attention, most_tokens, recorded)
        self.kv_caches = kv_cache.allocate(config, 1)
        cases = cases_of(local_model(config), config.cache.block_size, config.device, config.cache.kv_dtype)
        backend, case = config.attention_backend, planned_together(cases)

        def forward_of(num_tokens: int, num_rows: int, *, has_drafts: bool) -> BatchForward:
            length = get_backend(backend).work_length(num_tokens, num_rows, case) if case else 0
            table_length, asked = states.block_table_SB.shape[1], tensors_beside_steps(config)
            writes, device = states.writes, config.device
            buffers = InputBuffers(
                num_tokens, num_rows, table_length, writes, device, length, asked, has_drafts=has_drafts
            )
            return BatchForward(self.model, buffers, self.kv_caches, backend, case)

        self.prompts = forward_of(most_tokens, most_requests + 1, has_drafts=False)
        self.first = forward_of(FIRST * most_requests, FIRST * most_requests, has_drafts=True)
        self.further = forward_of(most_requests, most_requests, has_drafts=True)
        self._room = states.writes.field(most_requests)
        self._staged_room = NO_ROWS
        self._drafting = DraftingSteps(states)
        self._staged: tuple[DraftingRows, int] | None = None
        self._dispatcher = Dispatcher(config.graph, scheduler, query_lens=(FIRST,))
        self.keys = model_keys(self._dispatcher, lengths)

    def allocate(self, num_blocks: int) -> None:
        """Replace the KV cache by one of num_blocks blocks."""
        self.kv_caches[:] = kv_cache.allocate(self.config, num_blocks)

    def close(self) -> None:
        """Drop the last references to the weights and the cache."""
        self.kv_caches.clear()
        self.model.close()

    def propose(self, step: SchedulerOutput) -> None:
        """See NgramProposer.propose."""
        drafting = self.stage(step)
        self._states.writes.apply()
        self.draft(drafting)
        self.read_prompts(drafting)

    def stage(self, step: SchedulerOutput) -> Drafting:
        """Stage what the passes of a step are over. The requests have their rows and blocks."""
        rows = self._drafting.rows(step)
        count, longest = len(rows.rows_R), rows.longest(step)
        key = self._key(count, longest, len(rows.num_drafting))
        self._stage_rows(rows, count if key is None else key.num_requests // FIRST)
        prompts = None if rows.all_sampled else self._stage_prompts(step)
        num_drafting = rows.num_drafting or (0,)  # the first pass reads the tokens of requests without room too
        return Drafting(rows.rows_R, num_drafting, longest, key, prompts, FIRST * count)

    def _stage_prompts(self, step: SchedulerOutput) -> InputBatch | None:
        """Stage the tokens of requests that have not sampled, up to the last of their prompts: with a single one a step
        has room for drafts behind it, which are not there yet."""
        states, starts_R = self._states, np.array(step.starts, np.int64)
        left_R = states.prefill_len[states.rows(step.request_ids)] - starts_R
        counts_R = np.minimum(left_R, step.counts)
        of_prompts = np.flatnonzero(left_R > 0)
        of_prompts = of_prompts[np.argsort(counts_R[of_prompts] > 1, kind="stable")]
        if not of_prompts.size:
            return None
        chunks = replace(
            step,
            request_ids=[step.request_ids[index] for index in of_prompts.tolist()],
            starts=starts_R[of_prompts].tolist(),
            counts=counts_R[of_prompts].tolist(),
            samples=[False] * len(of_prompts),
        )
        return make_batch(chunks, states, self.prompts.buffers, None)

    def _key(self, num_requests: int, longest: int, num_drafts: int) -> GraphKey | None:
        key = self._dispatcher.dispatch(FIRST * num_requests, num_requests, FIRST, longest)
        length = next(length for length in self._lengths if length >= max(1, num_drafts))  # the first pass always runs
        return None if key is None or not key.is_decode else replace(key, drafts=length)

    def _stage_rows(self, rows: DraftingRows | None, padded: int) -> None:
        """Stage requests for the passes, unless they are there; None for padding alone."""
        if padded == 0 or (rows is not None and self._staged == (rows, padded)):
            return
        self._staged = None if rows is None else (rows, padded)
        rows_R, room_R = (NO_ROWS, NO_ROWS) if rows is None else (rows.rows_R, rows.room_R)
        padded_rows_R = np.full(padded, -1, np.int32)
        padded_rows_R[: len(rows_R)] = rows_R
        numbers = np.tile(np.arange(1 - FIRST, 1, dtype=np.int32), padded)
        starts = np.arange(FIRST * padded + 1, dtype=np.int32)
        self.first.buffers.stage_batch(np.repeat(padded_rows_R, FIRST), starts, numbers)
        self.further.buffers.stage_decodes(StagedDecodes([], NO_GENERATION, padded, [], rows_R, None))
        room = np.zeros(padded, np.int32)
        room[: len(room_R)] = room_R
        if not np.array_equal(room, self._staged_room):
            self._staged_room = room
            self._room.stage(0, room)

    def forget_staged(self) -> None:
        """Forget what was staged: it did not reach the device."""
        for each in (self.prompts, self.first, self.further):
            each.buffers.forget_staged()
        self._staged_room, self._staged = NO_ROWS, None

    def draft(self, drafting: Drafting) -> None:
        """Launch the passes that make the drafts, without a graph."""
        rows, longest = drafting.rows, drafting.longest
        for draft, count in enumerate(drafting.num_drafting):
            if draft > 0 and not count:
                return
            num_rows = drafting.num_tokens if draft == 0 else count
            if num_rows:
                with threads_for_step(num_rows, self._num_parameters, self.config.device):
                    self._pass(draft, num_rows, count, longest, rows[:count])

    def read_prompts(self, drafting: Drafting) -> None:
        """Launch the pass over prompts, if the step computes any."""
        if (batch := drafting.prompts) is not None:
            prepare(batch, self._states, self.prompts.buffers)
            with threads_for_step(batch.num_tokens, self._num_parameters, self.config.device):
                self.prompts(batch, hidden_wanted=True)

    def _pass(
        self,
        draft: int,
        num_rows: int,
        count: int,
        longest: int,
        rows: np.ndarray | None = None,
        *,
        distinct: bool = False,
    ) -> torch.Tensor | None:
        """Run the model on num_rows rows, and sample a draft of each of the first `count` requests; returns the logits,
        None for no requests. rows: of these in the states, for the filters; None: by temperature alone."""
        forward, query_len = (self.further, 1) if draft else (self.first, FIRST)
        batch = single_tokens(num_rows, query_len, longest)
        prepare(batch, self._states, forward.buffers)
        output = forward(batch, hidden_wanted=not count, distinct=distinct)
        if not count:
            return None
        last = slice(query_len - 1, query_len * count, query_len)
        logits_RV = self._logits(output, last)
        positions_R = forward.buffers.sample_positions_R[last].contiguous()
        tokens_R = self._sample(logits_RV, count, positions_R, rows)
        keep_drafts(self._states, self.further.buffers, self._room.tensor, tokens_R, draft)
        return logits_RV

    def _logits(self, output: ForwardOutput, last: slice) -> torch.Tensor:
        logits_RV = output.tensor[last] if output.is_logits else self.model.logits(output.tensor[last].contiguous())
        return logits_RV.float() if logits_RV.device.type == "cpu" else logits_RV

    def _sample(
        self, logits_RV: torch.Tensor, count: int, positions_R: torch.Tensor, rows: np.ndarray | None
    ) -> torch.Tensor:
        """As step_sampling.py does for the engine's model, so that filters hold for drafts too."""
        index_R = self.further.buffers.rows_R[:count]
        if rows is not None and self._sampler.sampler_class(rows) is SamplerClass.GENERAL:
            return self._sampler.sample(logits_RV.contiguous(), rows, index_R, positions_R)
        tokens_R = torch.empty(count, dtype=torch.int64, device=logits_RV.device)
        self._sampler.sample_by_temperature(logits_RV, index_R, positions_R, tokens_R)
        return tokens_R

    def fill(self, key: GraphKey) -> None:
        """See GraphStep."""
        self._fill(key.num_requests // FIRST, key.max_seq_len)

    def _fill(self, count: int, longest: int) -> None:
        """Fill the buffers of the passes with padding for `count` requests."""
        self._stage_rows(None, count)
        self._states.writes.apply()
        prepare(single_tokens(FIRST * count, FIRST, longest), self._states, self.first.buffers)
        prepare(single_tokens(count, 1, longest), self._states, self.further.buffers)

    def run_empty(self, num_tokens: int, num_requests: int, host_3: tuple[int, int, int], *, distinct: bool) -> None:
        """Run a pass over padding alone, without a trace. host_3: see AttentionInputs; its queries tell the pass, if
        every row has one token. distinct: see ModelForward.run."""
        if num_tokens == num_requests:
            _, query_len, longest = host_3
            count, draft = num_requests // query_len, 0 if query_len == FIRST else 1
            if draft < self._num_drafts:
                self._fill(count, longest)
                self._pass(draft, num_requests, count, longest, distinct=distinct)
            return
        batch = empty_batch(self.prompts.buffers, num_tokens, num_requests, host_3)
        self._states.writes.apply()
        prepare(batch, self._states, self.prompts.buffers)
        self.prompts(batch, hidden_wanted=True, distinct=distinct)

    def launch_inputs(self) -> None:
        """Launch the kernels of the passes beside the model, over padding."""
        self._fill(1, 1)
        for num_tokens, host_3 in ((1, (1, 1, 1)), (2, (0, 2, 2))):
            batch = empty_batch(self.prompts.buffers, num_tokens, 1, host_3)
            self._states.writes.apply()
            prepare(batch, self._states, self.prompts.buffers)
        tokens_R = torch.zeros(1, dtype=torch.int64, device=self.config.device)
        keep_drafts(self._states, self.further.buffers, self._room.tensor, tokens_R, 0)
        self.forget_staged()  # what was not launched has not arrived

    def run(self, key: GraphKey) -> torch.Tensor:
        """See GraphStep."""
        return self._run(key, distinct=False)

    def warm_up(self, key: GraphKey) -> None:
        """See GraphStep."""
        self._run(key, distinct=True)

    def _run(self, key: GraphKey, *, distinct: bool) -> torch.Tensor:
        count, logits_RV = key.num_requests // FIRST, None
        for draft in range(key.drafts):
            num_rows = count if draft else key.num_requests
            logits_RV = self._pass(draft, num_rows, count, key.max_seq_len, distinct=distinct)
        assert logits_RV is not None
        return logits_RV

    def tensor_ids(self) -> tuple[int, ...]:
        """See GraphStep."""
        inputs = (each.buffers.input_ids_T for each in (self.first, self.further))
        return tuple(map(id, (*inputs, *self.kv_caches[:1], *self.kv_caches[-1:])))
