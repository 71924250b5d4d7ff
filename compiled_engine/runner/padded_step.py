"""The step that CUDA graphs capture: of decodes all of it, of other batches the forward, with its inputs if whole."""

from __future__ import annotations

import torch

from compiled_engine.attention.case import AttentionCase
from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.attention.registry import get_backend
from compiled_engine.attention.step_tensors import arguments_of, attention_inputs_of
from compiled_engine.graphs.cuda_graphs.key import GraphKey, GraphKind
from compiled_engine.runner.input_batch import InputBatch, attention_inputs, empty_batch, prepare, step_of_batch
from compiled_engine.runner.input_buffers import InputBuffers
from compiled_engine.runner.model_forward import ForwardOutput, ModelForward
from compiled_engine.runner.request_states import RequestStates
from compiled_engine.runner.step_sampling import StepSampling


class PaddedStep:
    """Implements `GraphStep`. kv_caches: one tensor a layer; the list may be filled anew until the first capture.

    attention_case: what attention's work is planned for; None where each layer plans its own. samples: whether there
    are logits at the end of it, not what the next stage of a pipeline goes on with.
    """

    def __init__(
        self,
        model: ModelForward,
        sampling: StepSampling,
        states: RequestStates,
        buffers: InputBuffers,
        kv_caches: list[torch.Tensor],
        attention_backend: str,
        attention_case: AttentionCase | None,
        max_model_len: int,
        samples: bool = True,
    ):
        self.model, self.sampling, self.states = model, sampling, states
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
            self.sampling.without_tokens(batch, batch.num_rows)
            return output.tensor
        return self.sampling.every_row(output, batch, batch.num_rows)

    def forward(
        self,
        batch: InputBatch,
        *,
        hidden_wanted: bool = False,
        around_attention: bool = False,
        distinct: bool = False,
    ) -> ForwardOutput:
        """The model on the batch in the buffers, see `ModelForward.run`. around_attention: which is planned already."""
        step = step_of_batch(batch, self.buffers)
        inputs = attention_inputs_of(step, self._backend)
        if not around_attention:
            self._plan(inputs)
        return self.model.run(
            batch.padded_tokens,
            arguments_of(step, inputs, self.kv_caches),
            hidden_wanted=hidden_wanted,
            around_attention=around_attention,
            distinct=distinct,
        )

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
