"""Makes drafts with a smaller model that has the same vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from compiled_engine.config import EngineConfig
from compiled_engine.engine.forward import ForwardOutput, ModelForward
from compiled_engine.engine.input_batch import (
    NO_GENERATION,
    InputBatch,
    InputBuffers,
    StagedDecodes,
    empty_batch,
    make_batch,
    prepare,
    stage_empty,
)
from compiled_engine.engine.load_model import compile_in_turn, load_model
from compiled_engine.engine.messages import SchedulerOutput
from compiled_engine.engine.step_hooks import FeatureGraphs, RunnerParts
from compiled_engine.features.speculation.draft_rows import keep_drafts
from compiled_engine.features.speculation.drafter import NO_ROWS, Drafter, Drafting, single_tokens
from compiled_engine.features.speculation.drafting_rows import DraftingRows, DraftingSteps
from compiled_engine.features.speculation.graph_keys import FIRST, model_keys
from compiled_engine.features.speculation.graph_keys import drafting as drafting_key
from compiled_engine.graphs.compiler.signature import LOGITS, extra_step_tensors
from compiled_engine.graphs.cuda_graphs.dispatcher import Dispatcher, GraphKey
from compiled_engine.sampling.sampler import SamplerClass


class DraftModel(Drafter):
    """Makes drafts with a smaller model, sampled with the parameters and the noise of the request.

    The method is that of Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding",
    2023. With equal noise, two models choose the same token far more often than with independent noise (Daliri, Musco
    and Suresh, "Coupling without communication and drafter-invariant speculative decoding", 2024), and two equal models
    always do.

    The draft model has its own KV cache under the requests' block tables. In each step it runs before the engine's
    model, on the same tokens. The first pass computes the newest token of each request that has sampled and the token
    before it. The token before may be the previous step's last draft, which no pass has computed. Each further pass
    computes the previous pass's drafts. Prompts are computed after these passes. If a request ends or is preempted, a
    block in the prefix cache may lack K and V of a last draft, which makes later drafts worse but no token wrong.

    A CUDA graph (see `Capturable`) holds all passes over a number of requests. Passes need no value from the host: a
    request without room for a draft is padding in the passes after it. In a graph, drafts are sampled by temperature
    alone. Without a graph, the request's filters apply too.
    """

    query_lens: tuple[int, ...] = (FIRST,)  # rows per request in the first pass

    def __init__(self, config: EngineConfig, parts: RunnerParts) -> None:
        """Compile and load the draft model. `config` is the draft model's.

        Raises the errors of the compiler and the loader.
        """
        states, group, progress, timeline = parts.states, parts.group, parts.progress, parts.timeline
        self.config, self._states, self._sampler = config, states, parts.sampler
        self._lengths = parts.config.speculation.lengths  # the numbers of drafts that steps may have, ascending
        self._num_drafts = self._lengths[-1]
        self.compiled = compile_in_turn(config, group, parts.trace, progress, timeline)
        with timeline.span("load weights"):
            loaded = load_model(config, self.compiled, group, progress)
        scheduler = config.scheduler
        most_requests, most_tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        self.model = ModelForward(config, loaded, parts.on_attention)

        def buffers_of(num_tokens: int, num_rows: int, *, has_offsets: bool) -> InputBuffers:
            length, asked = self.model.work_length(num_tokens, num_rows), extra_step_tensors(config)
            table_length, writes, device = states.block_table_SB.shape[1], states.writes, config.device
            return InputBuffers(
                *(num_tokens, num_rows, table_length, writes, device, length, asked),
                has_offsets=has_offsets,
                shifts_positions=False,  # as if the prompt were text alone
            )

        # The inputs of the passes.
        self.prompts = buffers_of(most_tokens, most_requests + 1, has_offsets=False)
        self.first = buffers_of(FIRST * most_requests, FIRST * most_requests, has_offsets=True)
        self.further = buffers_of(most_requests, most_requests, has_offsets=True)
        self._room = states.writes.field(most_requests)
        self._staged_room = NO_ROWS
        self._rows_of_steps = DraftingSteps(states)
        self._staged: tuple[DraftingRows, int] | None = None
        self._dispatcher = Dispatcher(config.graph, scheduler, query_lens=(FIRST,))
        self._num_drafts_of = model_keys(self._dispatcher, self._lengths)

    def graphs(self, keys: Sequence[GraphKey], replay: Callable[[GraphKey, int], torch.Tensor]) -> FeatureGraphs:
        self._replay = replay
        return FeatureGraphs(keys, dict.fromkeys(self._num_drafts_of, self))

    def allocate(self, num_blocks: int) -> None:
        self.model.allocate(num_blocks)

    def close(self) -> None:
        self.model.close()

    def begin(self, step: SchedulerOutput) -> None:
        """Stage the inputs of the step's passes."""
        self._drafting = self.stage(step)

    def stage(self, step: SchedulerOutput) -> Drafting:
        """Stage the inputs of a step's passes: collect them for the kernel that writes them to the device.

        Return the sizes of the passes, their CUDA graph and the batch of prompts.

        The requests must have their rows and blocks.
        """
        rows = self._rows_of_steps.rows(step)
        count, longest = len(rows.rows_R), rows.longest(step)
        key = self._key(count, longest, len(rows.num_drafting))
        self._stage_rows(rows, count if key is None else key.num_rows // FIRST)
        prompts = None if rows.all_sampled else self._stage_prompts(step)
        num_drafting = rows.num_drafting or (0,)  # the first pass also reads tokens of requests without room
        return Drafting(rows.rows_R, num_drafting, longest, key, prompts, FIRST * count)

    def _stage_prompts(self, step: SchedulerOutput) -> InputBatch | None:
        """Stage the step's prompt tokens of requests that have not sampled.

        Return their batch, or None if there are none. The step's count for a prompt's last chunk may include room for
        drafts, which do not exist yet and are left out.
        """
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
        return make_batch(chunks, states, self.prompts, None)

    def _key(self, num_requests: int, longest: int, num_drafts: int) -> GraphKey | None:
        key = self._dispatcher.dispatch(FIRST * num_requests, num_requests, FIRST, longest)
        length = next(length for length in self._lengths if length >= max(1, num_drafts))  # the first pass always runs
        return None if key is None or not key.is_decode else drafting_key(key, length)

    def _stage_rows(self, rows: DraftingRows | None, padded: int) -> None:
        """Stage requests for the passes, padded to `padded` requests, unless they are staged already.

        rows: None stages padding alone.
        """
        if padded == 0 or (rows is not None and self._staged == (rows, padded)):
            return
        self._staged = None if rows is None else (rows, padded)
        rows_R, room_R = (NO_ROWS, NO_ROWS) if rows is None else (rows.rows_R, rows.room_R)
        padded_rows_R = np.full(padded, -1, np.int32)
        padded_rows_R[: len(rows_R)] = rows_R
        numbers = np.tile(np.arange(1 - FIRST, 1, dtype=np.int32), padded)
        starts = np.arange(FIRST * padded + 1, dtype=np.int32)
        self.first.stage_batch(np.repeat(padded_rows_R, FIRST), starts, numbers)
        self.further.stage_decodes(StagedDecodes([], NO_GENERATION, padded, [], rows_R, None))
        room = np.zeros(padded, np.int32)
        room[: len(room_R)] = room_R
        if not np.array_equal(room, self._staged_room):
            self._staged_room = room
            self._room.stage(0, room)

    def failed(self) -> None:
        self._drafting = None
        for buffers in (self.prompts, self.first, self.further):
            buffers.forget_staged()
        self._staged_room, self._staged = NO_ROWS, None

    def draft(self, drafting: Drafting) -> None:
        """Launch the drafting passes, without a graph."""
        rows, longest = drafting.rows, drafting.longest
        for draft, count in enumerate(drafting.num_drafting):
            if draft > 0 and not count:
                return
            num_rows = drafting.num_tokens if draft == 0 else count
            if num_rows:
                with self.model.threads(num_rows):
                    self._pass(draft, num_rows, count, longest, rows[:count])

    def read_prompts(self, drafting: Drafting) -> None:
        """Launch the pass over prompts, if the step computes any."""
        if (batch := drafting.prompts) is not None:
            prepare(batch, self._states, self.prompts)
            with self.model.threads(batch.num_tokens):
                self.model.forward(batch, self.prompts, hidden_wanted=True)

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
        """Run the model on num_rows rows, and sample draft `draft` (from 0) for each of the first `count` requests.

        Returns the logits, None if count is 0. longest: upper bound of the contexts. `rows` are the requests' rows in
        the states, for their filters; None: sample by temperature alone. See ModelForward.run for `distinct`.
        """
        buffers, query_len = (self.further, 1) if draft else (self.first, FIRST)
        batch = single_tokens(num_rows, query_len, longest)
        prepare(batch, self._states, buffers)
        output = self.model.forward(batch, buffers, hidden_wanted=not count, distinct=distinct)
        if not count:
            return None
        last = slice(query_len - 1, query_len * count, query_len)
        logits_RV = self._logits(output, last)
        positions_R = buffers.sample_positions_R[last].contiguous()
        tokens_R = self._sample(logits_RV, count, positions_R, rows)
        keep_drafts(self._states, self.further, self._room.tensor, tokens_R, draft)
        return logits_RV

    def _logits(self, output: ForwardOutput, last: slice) -> torch.Tensor:
        rows_R = output.tensor[last]
        logits_RV = rows_R if output.is_logits else self.model.ends[LOGITS](rows_R.contiguous())
        return logits_RV.float() if logits_RV.device.type == "cpu" else logits_RV

    def _sample(
        self, logits_RV: torch.Tensor, count: int, positions_R: torch.Tensor, rows: np.ndarray | None
    ) -> torch.Tensor:
        """Return the drafts sampled from these logits for the first `count` requests, int64 [R].

        Drafts are sampled as step_sampling.py samples tokens, so the requests' filters apply. rows: see `_pass`.
        """
        index_R = self.further.rows_R[:count]
        if rows is not None and self._sampler.sampler_class(rows) is SamplerClass.GENERAL:
            return self._sampler.sample(logits_RV.contiguous(), rows, index_R, positions_R)
        tokens_R = torch.empty(count, dtype=torch.int64, device=logits_RV.device)
        self._sampler.sample_by_temperature(logits_RV, index_R, positions_R, tokens_R)
        return tokens_R

    def _fill(self, count: int, longest: int) -> None:
        """Fill the passes' buffers with padding for `count` requests. longest: upper bound of the contexts."""
        self._stage_rows(None, count)
        self._states.writes.apply()
        prepare(single_tokens(FIRST * count, FIRST, longest), self._states, self.first)
        prepare(single_tokens(count, 1, longest), self._states, self.further)

    def run_empty(self, num_tokens: int, num_requests: int, host_3: tuple[int, int, int], *, distinct: bool) -> None:
        """Run the first pass, a further pass or the pass over prompts on padding, without side effects.

        num_requests: rows of the batch. If each row has one token, the query length in `host_3` selects the pass that
        makes drafts: the first pass for FIRST, otherwise a further one. See AttentionInputs for `host_3`, and
        ModelForward.run for `distinct`.
        """
        if num_tokens == num_requests:
            _, query_len, longest = host_3
            count, draft = num_requests // query_len, 0 if query_len == FIRST else 1
            if draft < self._num_drafts:
                self._fill(count, longest)
                self._pass(draft, num_requests, count, longest, distinct=distinct)
            return
        batch = empty_batch(self.prompts, num_tokens, num_requests, host_3)
        stage_empty(batch, self.prompts)
        self._states.writes.apply()
        prepare(batch, self._states, self.prompts)
        self.model.forward(batch, self.prompts, hidden_wanted=True, distinct=distinct)

    def launch_inputs(self, *, alone: bool) -> None:
        """Launch the kernels that run before and after the draft model, over padding. See Drafter for `alone`."""
        self._fill(1, 1)
        for num_tokens, host_3 in ((1, (1, 1, 1)), (2, (0, 2, 2))):
            batch = empty_batch(self.prompts, num_tokens, 1, host_3)
            stage_empty(batch, self.prompts)
            self._states.writes.apply()
            prepare(batch, self._states, self.prompts)
        tokens_R = torch.zeros(1, dtype=torch.int64, device=self.config.device)
        keep_drafts(self._states, self.further, self._room.tensor, tokens_R, 0)
        self.failed()  # in a dry run, staged values do not reach the device

    # Capturable ------------------------------------------------------------------------------------------------------

    def fill(self, key: GraphKey) -> None:
        """Fill the buffers of the passes with padding of the key's size. See Capturable."""
        self._fill(key.num_rows // FIRST, key.max_seq_len)

    def run(self, key: GraphKey) -> torch.Tensor:
        return self._run(key, distinct=False)

    def warm_up(self, key: GraphKey) -> None:
        self._run(key, distinct=True)

    def _run(self, key: GraphKey, *, distinct: bool) -> torch.Tensor:
        count, logits_RV = key.num_rows // FIRST, None
        for draft in range(self._num_drafts_of[key]):
            num_rows = count if draft else key.num_rows
            logits_RV = self._pass(draft, num_rows, count, key.max_seq_len, distinct=distinct)
        assert logits_RV is not None
        return logits_RV

    def tensor_ids(self) -> tuple[int, ...]:
        inputs, caches = (each.input_ids_T for each in (self.first, self.further)), self.model.kv_caches
        return tuple(map(id, (*inputs, *caches[:1], *caches[-1:])))
