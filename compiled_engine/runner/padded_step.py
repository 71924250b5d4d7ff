"""The step that CUDA graphs capture: of decodes all of it, of other batches the forward, with its inputs if whole."""

from __future__ import annotations

import torch

from compiled_engine.attention.case import AttentionCase
from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.attention.registry import get_backend
from compiled_engine.graphs.cuda_graphs.key import GraphKey, GraphKind
from compiled_engine.runner.advance import advance
from compiled_engine.runner.input_batch import InputBatch, attention_inputs, empty_batch, prepare
from compiled_engine.runner.input_buffers import InputBuffers
from compiled_engine.runner.model_forward import ForwardOutput, ModelForward
from compiled_engine.runner.request_states import RequestStates
from compiled_engine.sampling.sampler import Sampler


class PaddedStep:
    """Implements `GraphStep`. kv_caches: one tensor a layer; the list may be filled anew until the first capture.

    attention_case: what attention's work is planned for; None where each layer plans its own. samples: whether there
    are logits at the end of it, not what the next stage of a pipeline goes on with.
    """

    def __init__(
        self,
        model: ModelForward,
        sampler: Sampler,
        states: RequestStates,
        buffers: InputBuffers,
        kv_caches: list[torch.Tensor],
        attention_backend: str,
        attention_case: AttentionCase | None,
        max_model_len: int,
        samples: bool = True,
    ):
        self.model, self.sampler, self.states = model, sampler, states
        self.buffers, self.kv_caches = buffers, kv_caches
        self._backend, self._case, self._max_model_len = attention_backend, attention_case, max_model_len
        self.samples = samples

    def fill(self, key: GraphKey) -> None:
        batch = self._empty(key)
        self.states.writes.apply()
        self.prepared_inputs(batch)

    def run(self, key: GraphKey) -> torch.Tensor:
        """A decode key: input preparation, forward, logits, sampling by temperature and seed, advance of the states;
        where nothing is sampled, what there is of these. Another full key: input preparation and forward. Any other:
        the forward of inputs that are there."""
        return self._run(key, distinct=False)

    def warm_up(self, key: GraphKey) -> None:
        """What `run` does, but with one call of each kind of the forward, in which layers are alike."""
        self._run(key, distinct=True)

    def _run(self, key: GraphKey, *, distinct: bool) -> torch.Tensor:
        batch = self._empty(key)
        self.states.writes.discard()  # `fill` made these writes
        if key.kind is GraphKind.FULL:
            prepare(batch, self.states, self.buffers)
        output = self.forward(batch, around_attention=key.kind is not GraphKind.FULL, distinct=distinct)
        if not key.is_decode:
            return output.tensor
        if not self.samples:
            self.advance_without_tokens(batch, batch.num_rows)
            return output.tensor
        logits_RV = output.tensor if output.is_logits else self.model.logits(output.tensor)
        sample_and_advance(logits_RV, self.sampler, self.states, self.buffers, batch, batch.num_rows)
        return logits_RV

    def forward(
        self,
        batch: InputBatch,
        *,
        hidden_wanted: bool = False,
        around_attention: bool = False,
        distinct: bool = False,
    ) -> ForwardOutput:
        """The model on the batch in the buffers, see `ModelForward.run`. around_attention: which is planned already."""
        inputs = attention_inputs(batch, self.buffers, self._backend)
        if not around_attention:
            self._plan(inputs)
        arguments = (
            self.buffers.input_ids_T[: batch.padded_tokens],
            self.buffers.positions_T[: batch.padded_tokens],
            inputs,
            self.kv_caches,
        )
        return self.model.run(
            batch.padded_tokens,
            arguments,
            hidden_wanted=hidden_wanted,
            around_attention=around_attention,
            distinct=distinct,
        )

    def advance_without_tokens(self, batch: InputBatch, num_rows: int) -> None:
        """Of a step that samples nothing here."""
        nobody_R = self.buffers.sample_positions_R
        advance(self.states, self.buffers, nobody_R, num_rows, decodes_only=batch.decodes_only)

    def prepared_inputs(self, batch: InputBatch) -> AttentionInputs:
        """Make the batch's inputs from what was staged, and plan attention's work."""
        prepare(batch, self.states, self.buffers)
        inputs = attention_inputs(batch, self.buffers, self._backend)
        self._plan(inputs)
        return inputs

    def output(self, key: GraphKey, result: torch.Tensor) -> ForwardOutput:
        """What `run` returned, or a replay left, for a key."""
        return ForwardOutput(result, key.is_decode or self.model.ends_at_logits(key.num_tokens))

    def addresses(self) -> tuple[int, ...]:
        """Of one buffer for each use and of the first and the last cache: they are replaced together if at all."""
        buffers, caches = self.buffers, self.kv_caches
        read = (buffers.input_ids_T, buffers.slot_mapping_T, buffers.rows_R, self.states.last_token_S)
        return tuple(tensor.data_ptr() for tensor in (*read, caches[0], caches[-1]))

    def _plan(self, inputs: AttentionInputs) -> None:
        if self._case is not None:
            get_backend(self._backend).plan(inputs, self._case)

    def _empty(self, key: GraphKey) -> InputBatch:
        if key.kind is GraphKind.FULL:
            host = (key.num_decodes, key.max_query_len, key.max_seq_len)
            return empty_batch(self.buffers, key.num_tokens, key.num_requests, host, key)
        # Attention is not captured, only warmed up.
        return empty_batch(self.buffers, key.num_tokens, 1, (0, key.num_tokens, self._max_model_len), key)


def sample_and_advance(
    logits_RV: torch.Tensor,
    sampler: Sampler,
    states: RequestStates,
    buffers: InputBuffers,
    batch: InputBatch,
    num_rows: int,
) -> None:
    """Tokens for num_rows rows by temperature and seed alone, taken into the states and handed to the host."""
    rows = slice(0, num_rows)
    token_ids_R = torch.empty(num_rows, dtype=torch.int64, device=logits_RV.device)
    if logits_RV.device.type == "cpu":
        logits_RV = logits_RV.float()
    sampler.sample_by_temperature(logits_RV[rows], buffers.rows_R[rows], buffers.sample_positions_R[rows], token_ids_R)
    advance(states, buffers, token_ids_R, num_rows, decodes_only=batch.decodes_only)
