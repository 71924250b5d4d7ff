"""Makes drafts with a head, which reads hidden states of the model: an EAGLE-3 head or an MTP layer.

After each step, `prefill_head` computes the head's KV cache for the step's tokens, from the model's hidden states.
Before each step, `draft` makes the drafts that the step verifies. Both run without values from the host, which does not
know the newest tokens yet. For batches of decodes on a GPU, each may be a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from compiled_engine.attention.inputs import arguments_of, attention_inputs_of
from compiled_engine.config import EngineConfig
from compiled_engine.engine.forward import ForwardOutput, ModelForward
from compiled_engine.engine.input_batch import (
    NO_GENERATION,
    InputBatch,
    InputBuffers,
    StagedDecodes,
    empty_batch,
    prepare,
    stage_empty,
    step_of_batch,
)
from compiled_engine.engine.load_model import compile_in_turn, load_model
from compiled_engine.engine.messages import SchedulerOutput
from compiled_engine.engine.request_states import RequestStates
from compiled_engine.engine.step_hooks import FeatureGraphs, RunnerParts
from compiled_engine.features.speculation.draft_rows import HeadInputs, keep_drafts
from compiled_engine.features.speculation.draft_sharpness import sharpness_of
from compiled_engine.features.speculation.drafter import NO_ROWS, Drafter, Drafting, single_tokens
from compiled_engine.features.speculation.drafting_rows import DraftingRows, DraftingSteps
from compiled_engine.features.speculation.graph_keys import drafting as drafting_key
from compiled_engine.features.speculation.graph_keys import head_keys, prefill_head_keys
from compiled_engine.graphs.compiler.signature import COMBINE, LOGITS, extra_step_tensors
from compiled_engine.graphs.cuda_graphs.dispatcher import Dispatcher, GraphKey
from compiled_engine.kernels.launch_arguments import dependent_launch
from compiled_engine.models.checkpoint.eagle3_folder import EMBEDDING, draft_tokens, has_embedding
from compiled_engine.models.checkpoint.loader import CheckedWeights
from compiled_engine.models.checkpoint.mtp_layer import has_mtp_layer, shared_shapes
from compiled_engine.models.textbook.eagle3 import FEATURES
from compiled_engine.parallel.rank_share import local_model

WORK = "attention_inputs.work_W"


def following_tokens(
    states: RequestStates, batch: InputBatch, buffers: InputBuffers, token_ids_T: torch.Tensor
) -> None:
    """Write to `token_ids_T`, int64, the token that follows each token of a step in its request.

    The step's sampled tokens must be in the states. Padding gets 0. The token after a rejected draft is arbitrary.
    """
    if buffers.rows_R.device.type != "cpu":
        launch_following_tokens(states, batch, buffers, token_ids_T)
        return
    num_rows, num_tokens = batch.num_rows, batch.padded_tokens
    starts_R1 = buffers.starts_of_decodes_R1 if batch.decodes_only else buffers.query_start_loc_R1
    lens_R = np.diff(starts_R1.numpy()[: num_rows + 1])
    rows_T = np.repeat(buffers.rows_R.numpy()[:num_rows], lens_R)[:num_tokens]
    places_T = buffers.positions_T.numpy()[: len(rows_T)] + 1
    if states.position_shift_S is not None:
        places_T -= states.position_shift_S.numpy()[rows_T]
    if states.history_SL is None:
        found_T = states.all_token_ids_KL.numpy()[states.token_row_S.numpy()[rows_T], places_T]
    else:
        found_T = states.history_SL.numpy()[rows_T, places_T]
    token_ids_T[:num_tokens] = 0
    token_ids_T.numpy()[: len(rows_T)] = np.where(rows_T >= 0, found_T, 0)


def launch_following_tokens(
    states: RequestStates, batch: InputBatch, buffers: InputBuffers, token_ids_T: torch.Tensor
) -> None:
    from compiled_engine.features.speculation.draft_head_kernels import (  # Triton is not installed everywhere
        TILE,
        following_kernel,
    )

    assert states.history_SL is not None
    following_kernel[(batch.num_rows if batch.decodes_only else batch.num_rows + 1,)](
        buffers.rows_R,
        buffers.query_start_loc_R1,
        buffers.positions_T,
        states.position_shift_S,
        states.history_SL,
        token_ids_T,
        batch.num_rows,
        batch.padded_tokens,
        states.history_SL.stride(0),
        DECODES_ONLY=batch.decodes_only,
        TILE=32 if batch.decodes_only else TILE,
        num_warps=1 if batch.decodes_only else 4,
        **dependent_launch(buffers.rows_R.device),
    )


def keep_hidden(
    states: RequestStates, buffers: InputBuffers, num_rows: int, hidden_TD: torch.Tensor, kept_SD: torch.Tensor
) -> None:
    """Store the hidden state of each request's last verified token in `kept_SD`, by the request's row in the states.

    num_rows: rows of the batch in `buffers`. hidden_TD: hidden states of the batch's tokens.
    """
    if kept_SD.device.type != "cpu":
        launch_keep_hidden(states, buffers, num_rows, hidden_TD, kept_SD)
        return
    rows_R, ends_R = buffers.rows_R[:num_rows], buffers.sample_positions_R[:num_rows]
    real_R = (rows_R >= 0) & (ends_R == states.num_computed_S[rows_R.long()])
    kept_SD[rows_R[real_R].long()] = hidden_TD[buffers.logits_index_R[:num_rows][real_R]]


def launch_keep_hidden(
    states: RequestStates, buffers: InputBuffers, num_rows: int, hidden_TD: torch.Tensor, kept_SD: torch.Tensor
) -> None:
    from compiled_engine.features.speculation.draft_head_kernels import (  # Triton is not installed everywhere
        TILE,
        keep_hidden_kernel,
    )

    keep_hidden_kernel[(num_rows,)](
        buffers.rows_R,
        buffers.sample_positions_R,
        buffers.logits_index_R,
        states.num_computed_S,
        hidden_TD,
        kept_SD,
        SIZE=kept_SD.shape[1],
        TILE=TILE,
        **dependent_launch(kept_SD.device),
    )


def begin_drafts(
    states: RequestStates,
    rows_R: torch.Tensor,
    kept_SD: torch.Tensor,
    hidden_RD: torch.Tensor,
    positions_R: torch.Tensor,
) -> None:
    """Copy the hidden states that `keep_hidden` has stored for these rows, and write their first drafts' positions.

    The hidden states are copied from kept_SD to hidden_RD. rows_R: rows of the states, int32, -1 for padding, which
    gets zeros and position 1. positions_R: int64, the positions.
    """
    if rows_R.device.type != "cpu":
        launch_begin_drafts(states, rows_R, kept_SD, hidden_RD, positions_R)
        return
    real_R, states_R = rows_R >= 0, rows_R.long().clamp(min=0)
    hidden_RD.copy_(torch.where(real_R[:, None], kept_SD[states_R], 0.0))
    positions_R.copy_(torch.where(real_R, states.num_computed_S[states_R], 0) + 1)


def launch_begin_drafts(
    states: RequestStates,
    rows_R: torch.Tensor,
    kept_SD: torch.Tensor,
    hidden_RD: torch.Tensor,
    positions_R: torch.Tensor,
) -> None:
    from compiled_engine.features.speculation.draft_head_kernels import (  # Triton is not installed everywhere
        TILE,
        begin_drafts_kernel,
    )

    begin_drafts_kernel[(len(rows_R),)](
        rows_R,
        states.num_computed_S,
        kept_SD,
        hidden_RD,
        positions_R,
        SIZE=kept_SD.shape[1],
        TILE=TILE,
        **dependent_launch(rows_R.device),
    )


def shared_tensors(config: EngineConfig, parts: RunnerParts) -> dict[str, torch.Tensor]:
    """Return the tensors that the head takes from the engine's model, by their names in the head.

    config: the head's. parts: those of the engine's runner. Raises ValueError if the model lacks such a tensor.
    """
    head = local_model(config)
    if head.head is not None and head.head.is_mtp:
        shapes = shared_shapes(head)
        found = {name: parts.tensors[name] for name in shapes if name in parts.tensors}
        for name, wanted in shapes.items():
            if name not in found or tuple(found[name].shape) != wanted:
                raise ValueError(f"the MTP layer shares {name}, which the model does not have as {list(wanted)}")
        return found
    if has_embedding(head):
        return {}
    shape = head.vocab_size, head.hidden_size
    embedding_VD = next((each for each in parts.module.parameters() if tuple(each.shape) == shape), None)
    if embedding_VD is None:
        raise ValueError(f"{head.path} has no {EMBEDDING}, and the model has none of {list(shape)} that it could use")
    return {EMBEDDING: embedding_VD.data}


class DraftHead(Drafter):
    """Makes drafts with a draft head, a small network that reads hidden states of the engine's model.

    The head has its own KV cache under the requests' block tables. The entry of a position is computed from the model's
    hidden states there and the token after it. `prefill_head` computes the entries of all tokens of a step: prompts,
    newest tokens, and drafts. It replaces the entries that drafting computed for drafts. So if a block is in the prefix
    cache, the head's entries are there too. Only the block's last entry may have been computed with another token after
    it, which makes drafts worse but no token wrong. Wrong drafts leave entries after the newest token, which the next
    drafts overwrite before they are read.

    Drafts are sampled by temperature and noise alone; the request's filters apply when drafts are verified.
    """

    def __init__(self, config: EngineConfig, parts: RunnerParts) -> None:
        """Compile and load the head. `config` is the head's. Raises the errors of the compiler and the loader."""
        engine, states, buffers = parts.config, parts.states, parts.buffers
        self.config, self._states, self._sampler, self._steps = config, states, parts.sampler, buffers
        self._load(config, parts)
        self._lengths = engine.speculation.lengths
        self.query_lens = engine.speculation.verified
        scheduler, device, dtype = config.scheduler, config.device, config.model.dtype
        most_tokens, most_requests = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
        asked = extra_step_tensors(config)
        own = InputBuffers(
            most_requests,
            most_requests,
            states.block_table_SB.shape[1],
            states.writes,
            device,
            self.model.work_length(most_requests, most_requests),
            asked,
            has_offsets=True,
        )
        self.prompts = self._own = own
        self._asked = tuple(tensor.name for tensor in asked)
        rows = buffers.rows_R.shape[0]
        size = config.model.hidden_size
        self._work_W = torch.zeros(self.model.work_length(most_tokens, rows), dtype=torch.int32, device=device)
        self._token_ids_T = torch.zeros(most_tokens, dtype=torch.int64, device=device)
        self._features_TD = torch.zeros(most_tokens, size, dtype=dtype, device=device)
        self._kept_SD = torch.zeros(states.num_computed_S.shape[0], size, dtype=dtype, device=device)
        self._begun_RD = torch.zeros(most_requests, size, dtype=dtype, device=device)
        self._inputs = HeadInputs(
            torch.zeros(most_requests, dtype=torch.int64, device=device),
            torch.zeros(most_requests, dtype=torch.int64, device=device),
        )
        self._room = states.writes.field(most_requests)
        self._sharpness = states.writes.field(1, dtype=torch.float32, initial=1.0)
        self._staged_room, self._staged_sharpness = NO_ROWS, 1.0
        self._rows_of_steps = DraftingSteps(states)
        self._staged: tuple[DraftingRows, int] | None = None
        self._dispatcher = Dispatcher(config.graph, scheduler)
        self._num_drafts_of = head_keys(self._dispatcher, self._lengths)
        self._prefill_head_keys: dict[GraphKey, GraphKey] = {}

    def _load(self, config: EngineConfig, parts: RunnerParts) -> None:
        group, progress, timeline = parts.group, parts.progress, parts.timeline
        shared = shared_tensors(config, parts)
        self.compiled = compile_in_turn(config, group, parts.trace, progress, timeline)
        with timeline.span("load weights"):
            loaded = load_model(config, self.compiled, group, progress, shared)
            head = config.model.head
            token_ids_V = None if head is not None and head.is_mtp else draft_tokens(config.model)
        self._weights = loaded.weights
        self.model = ModelForward(config, loaded, parts.on_attention)
        # The model's token id for each token id of the head, int64; None if the logits are as the model's.
        self._token_ids_V = None if token_ids_V is None else token_ids_V.to(config.device)

    def graphs(self, keys: Sequence[GraphKey], replay: Callable[[GraphKey, int], torch.Tensor]) -> FeatureGraphs:
        read = [key for key in keys if not key.without_offsets]
        self._prefill_head_keys = prefill_head_keys(read, self.config.scheduler.max_model_len)
        self._replay = replay
        return FeatureGraphs(keys, dict.fromkeys((*self._prefill_head_keys.values(), *self._num_drafts_of), self))

    def check_weights(self, tensors: dict[str, torch.Tensor], source: Path) -> CheckedWeights | None:
        model = self.config.model
        is_mtp = model.head is not None and model.head.is_mtp
        return self._weights.check(tensors, source) if is_mtp and has_mtp_layer(tensors, model.architecture) else None

    def allocate(self, num_blocks: int) -> None:
        self.model.allocate(num_blocks)

    def close(self) -> None:
        self.model.close()

    def failed(self) -> None:
        self._own.forget_staged()
        self._staged_room, self._staged_sharpness, self._staged, self._drafting = NO_ROWS, -1.0, None, None

    # Prefill the head -----------------------------------------------------------------------------------------------

    def in_forward(self, batch: InputBatch, output: ForwardOutput) -> None:
        if batch.has_offsets:  # an MTP layer reads the last hidden states, which are the result unless it is logits
            self.combine_hidden_states(output.further or (output.tensor,))

    def combine_hidden_states(self, hidden_states: tuple[torch.Tensor, ...]) -> None:
        """Compute the head's input features for a step's tokens, and store them in a buffer.

        hidden_states: those of the engine's model that the head reads, [T, target_size] each. A CUDA graph of the
        forward may include this work.
        """
        combine = self.model.ends.get(COMBINE)
        features_TD = hidden_states[0] if combine is None else combine(torch.cat(hidden_states, dim=-1))
        self._features_TD[: len(features_TD)].copy_(features_TD)

    def after_step(self, batch: InputBatch) -> None:
        """Compute the head's KV cache for the tokens of a step, unless the step skips the head.

        Replays a CUDA graph if the batch has one for this; only batches of decodes do.
        """
        if not batch.has_offsets:
            return
        key = batch.key
        if key is not None:
            key = self._prefill_head_keys.get(key._replace(extra=()) if key.extra else key)
        if key is None:
            self.prefill_head(batch)
        else:
            self._replay(key, batch.num_tokens)

    def prefill_head(self, batch: InputBatch, *, distinct: bool = False) -> torch.Tensor:
        """Run the head on the tokens of a step, and keep the hidden states with which `draft` begins.

        Returns the hidden states of all tokens, [T, D]. The step's tokens must be in the states, and their features
        combined. May be captured in a CUDA graph. See ModelForward.run for `distinct`.
        """
        states, steps = self._states, self._steps
        following_tokens(states, batch, steps, self._token_ids_T)
        given = step_of_batch(batch, steps)
        step = {name: tensor for name, tensor in given.items() if name.startswith("attention_inputs.")}
        step |= {"input_ids_T": self._token_ids_T[: batch.padded_tokens], "positions_T": given["positions_T"]}
        step |= {name: given[name] for name in self._asked if name != FEATURES}
        step |= {WORK: self._work_W, FEATURES: self._features_TD[: batch.padded_tokens]}
        hidden_TD = self._forward(batch.padded_tokens, step, distinct=distinct)
        keep_hidden(states, steps, batch.num_rows, hidden_TD, self._kept_SD)
        return hidden_TD

    def _forward(self, num_tokens: int, step: dict[str, torch.Tensor], *, distinct: bool) -> torch.Tensor:
        named = {name: step[name] for name in (*(name for name in step if name not in self._asked), *self._asked)}
        inputs = attention_inputs_of(named, self.config.attention_backend)
        self.model.plan(inputs)
        return self.model.run(num_tokens, arguments_of(named, inputs, self.model.kv_caches), distinct=distinct).tensor

    # Draft ----------------------------------------------------------------------------------------------------------

    def begin(self, step: SchedulerOutput) -> None:
        """Stage the inputs of the step's drafting passes, unless the step skips the head."""
        self._drafting = None if step.single else self.stage(step)

    def stage(self, step: SchedulerOutput) -> Drafting:
        """Stage the inputs of a step's drafting passes: collect them for the kernel that writes them to the device.

        Return the sizes of the passes and their CUDA graph. The requests must have rows and blocks.
        """
        rows = self._rows_of_steps.rows(step)
        longest, key = rows.longest(step), None
        count = rows.num_drafting[0] if rows.num_drafting else 0  # requests with room for a draft come first
        if count:
            key = self._dispatcher.dispatch(count, count, 1, longest)
            length = min(length for length in self._lengths if length >= len(rows.num_drafting))
            key = None if key is None or not key.is_decode else drafting_key(key, length)
        if (sharpness := sharpness_of(step)) != self._staged_sharpness:
            self._staged_sharpness = sharpness
            self._sharpness.stage(0, np.array([sharpness], np.float32))
        self._stage_rows(rows, count if key is None else key.num_rows)
        return Drafting(rows.rows_R[:count], rows.num_drafting, longest, key, None, count)

    def _stage_rows(self, rows: DraftingRows | None, padded: int) -> None:
        """Stage the requests with room for a draft, padded to `padded` rows, unless they are staged already.

        rows: None stages padding alone.
        """
        if padded == 0 or (rows is not None and self._staged == (rows, padded)):
            return
        self._staged = None if rows is None else (rows, padded)
        room = np.zeros(padded, np.int32)
        rows_R = NO_ROWS
        if rows is not None:
            count = rows.num_drafting[0]
            rows_R, room[:count] = rows.rows_R[:count], rows.room_R[:count]
        self._own.stage_decodes(StagedDecodes([], NO_GENERATION, padded, [], rows_R, None))
        if not np.array_equal(room, self._staged_room):
            self._staged_room = room
            self._room.stage(0, room)

    def draft(self, drafting: Drafting) -> None:
        """Launch the drafting passes, without a graph."""
        if drafting.num_drafting:
            self._draft(len(drafting.rows), len(drafting.num_drafting), drafting.longest)

    def _draft(self, count: int, num_drafts: int, longest: int, *, distinct: bool = False) -> torch.Tensor:
        """Make num_drafts drafts for each of the first `count` staged rows. Return the last pass's logits.

        longest: upper bound of the contexts. See ModelForward.run for `distinct`.
        """
        states, own, given = self._states, self._own, self._inputs
        rows_R, hidden_RD = own.rows_R[:count], self._begun_RD[:count]
        begin_drafts(states, rows_R, self._kept_SD, hidden_RD, given.positions_R[:count])
        logits_RV = hidden_RD
        for draft in range(num_drafts):
            if draft:
                batch = single_tokens(count, 1, longest)
                prepare(batch, states, own)
                step = step_of_batch(batch, own)
                step |= {"input_ids_T": given.token_ids_T[:count], FEATURES: hidden_RD}
                hidden_RD = self._forward(count, step, distinct=distinct)
            logits_RV = self.model.ends[LOGITS](hidden_RD)
            tokens_R = torch.empty(count, dtype=torch.int64, device=logits_RV.device)
            self._sampler.sample_drafts(
                logits_RV, self._token_ids_V, self._sharpness.tensor, rows_R, given.positions_R[:count], tokens_R
            )
            keep_drafts(states, own, self._room.tensor, tokens_R, draft, given)
        return logits_RV

    # Capturable ------------------------------------------------------------------------------------------------------

    def fill(self, key: GraphKey) -> None:
        """Fill the inputs of the key's graph, which runs `_draft` or `prefill_head`, with padding. See Capturable."""
        if key not in self._num_drafts_of:
            self._fill_step(key.num_tokens, key.num_rows, (key.num_decodes, key.max_query_len, key.max_seq_len))
        else:
            self._fill_drafts(key.num_rows, key.max_seq_len)

    def _fill_step(self, num_tokens: int, num_rows: int, host_3: tuple[int, int, int]) -> InputBatch:
        batch = empty_batch(self._steps, num_tokens, num_rows, host_3)
        stage_empty(batch, self._steps)
        self._states.writes.apply()
        prepare(batch, self._states, self._steps)
        return batch

    def _fill_drafts(self, count: int, longest: int) -> None:
        self._stage_rows(None, count)
        self._states.writes.apply()
        prepare(single_tokens(count, 1, longest), self._states, self._own)

    def run(self, key: GraphKey) -> torch.Tensor:
        return self._run(key, distinct=False)

    def warm_up(self, key: GraphKey) -> None:
        self._run(key, distinct=True)

    def _run(self, key: GraphKey, *, distinct: bool) -> torch.Tensor:
        if (num_drafts := self._num_drafts_of.get(key)) is not None:
            return self._draft(key.num_rows, num_drafts, key.max_seq_len, distinct=distinct)
        host_3 = key.num_decodes, key.max_query_len, key.max_seq_len
        batch = empty_batch(self._steps, key.num_tokens, key.num_rows, host_3, key._replace(purpose=""))
        return self.prefill_head(batch, distinct=distinct)

    def tensor_ids(self) -> tuple[int, ...]:
        return tuple(map(id, (self._token_ids_T, self._features_TD, self._own.rows_R, *self.model.kv_caches[:1])))

    def run_empty(self, num_tokens: int, num_requests: int, host_3: tuple[int, int, int], *, distinct: bool) -> None:
        """Prefill the head with a step that has only padding. If the step has only decodes, also draft.

        The step has only decodes if num_tokens == num_requests. See AttentionInputs for `host_3`, and ModelForward.run
        for `distinct`.
        """
        batch = self._fill_step(num_tokens, num_requests, host_3)
        head = self.config.model.head
        assert head is not None
        hidden_TD = torch.zeros(num_tokens, head.target_size, dtype=self.config.model.dtype, device=self.config.device)
        self.combine_hidden_states((hidden_TD,) * max(1, head.num_aux_layers))
        self.prefill_head(batch, distinct=distinct)
        if num_tokens == num_requests:
            _, query_len, longest = host_3
            self._fill_drafts(num_requests // query_len, longest)
            self._draft(num_requests // query_len, max(self._lengths), longest, distinct=distinct)

    def launch_inputs(self, *, alone: bool) -> None:
        """Launch the kernels that run before and after the head, over padding. See Drafter for `alone`."""
        for num_tokens, host_3 in ((1, (1, 1, 1)), (2, (0, 2, 2))):
            batch = self._fill_step(num_tokens, 1, host_3)
            following_tokens(self._states, batch, self._steps, self._token_ids_T)
        self._fill_drafts(1, 1)
        hidden_1D, given, rows_1 = self._begun_RD[:1], self._inputs, self._own.rows_R[:1]
        keep_hidden(self._states, self._steps, 1, hidden_1D, self._kept_SD)
        begin_drafts(self._states, rows_1, self._kept_SD, hidden_1D, given.positions_R[:1])
        size = local_model(self.config).vocab_size if self._token_ids_V is None else len(self._token_ids_V)
        logits_1V = torch.zeros(1, size, dtype=self.config.model.dtype, device=self.config.device)
        tokens_1 = torch.zeros(1, dtype=torch.int64, device=self.config.device)
        sampler = self._sampler.alone() if alone else self._sampler
        sampler.sample_drafts(
            logits_1V, self._token_ids_V, self._sharpness.tensor, rows_1, given.positions_R[:1], tokens_1
        )
        keep_drafts(self._states, self._own, self._room.tensor, tokens_1, 0, given)
        self.failed()
        self._steps.forget_staged()  # in a dry run, staged values do not reach the device
