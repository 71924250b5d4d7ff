"""The step that CUDA graphs capture: the forward, and for decodes the logits, of a padded batch in the buffers."""

from __future__ import annotations

import torch

from compiled_engine.graphs.graph_key import GraphKey, GraphKind
from compiled_engine.runner.input_batch import attention_inputs, empty_batch
from compiled_engine.runner.input_buffers import InputBuffers
from compiled_engine.runner.model_forward import ForwardOutput, ModelForward


class PaddedStep:
    """Implements `GraphStep`. kv_caches: one tensor a layer; the list may be filled anew until the first capture."""

    def __init__(
        self,
        forward: ModelForward,
        buffers: InputBuffers,
        kv_caches: list[torch.Tensor],
        attention_backend: str,
        max_model_len: int,
    ):
        self._forward, self._buffers, self._kv_caches = forward, buffers, kv_caches
        self._backend, self._max_model_len = attention_backend, max_model_len

    def fill(self, key: GraphKey) -> None:
        empty_batch(self._buffers, key.num_tokens, key.num_requests or 1)

    def run(self, key: GraphKey) -> torch.Tensor:
        host = (key.num_decodes, key.max_query_len, key.max_seq_len)
        if key.kind is not GraphKind.FULL:  # attention is not captured, only warmed up
            host = (0, key.num_tokens, self._max_model_len)
        inputs = attention_inputs(self._buffers, key.num_tokens, key.num_requests or 1, host, self._backend)
        arguments = (
            self._buffers.input_ids_T.device[: key.num_tokens],
            self._buffers.positions_T.device[: key.num_tokens],
            inputs,
            self._kv_caches,
        )
        output = self._forward.run(key.num_tokens, arguments, around_attention=key.kind is not GraphKind.FULL)
        if key.is_decode and not output.is_logits:
            return self._forward.logits(output.tensor)
        return output.tensor

    def output(self, key: GraphKey, result: torch.Tensor) -> ForwardOutput:
        """What `run` returned, or a replay left, for a key."""
        return ForwardOutput(result, key.is_decode or self._forward.ends_at_logits(key.num_tokens))

    def addresses(self) -> tuple[int, ...]:
        """Of one buffer for each use and of the first and the last cache: they are replaced together if at all."""
        buffers, caches = self._buffers, self._kv_caches
        read = (buffers.input_ids_T.device, buffers.slot_mapping_T.device, buffers.block_table_RB.device)
        return tuple(tensor.data_ptr() for tensor in (*read, caches[0], caches[-1]))
