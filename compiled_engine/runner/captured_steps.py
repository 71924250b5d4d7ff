"""CUDA graphs of steps: what is captured, which graph serves a batch, and its replay.

A graph of decodes holds the whole step, another full graph the forward with its inputs, graphs in parts the forward
alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from compiled_engine.attention.backend import get_backend
from compiled_engine.attention.case import AttentionCase
from compiled_engine.attention.inputs import AttentionInputs, arguments_of, attention_inputs_of
from compiled_engine.config import EngineConfig, GraphConfig
from compiled_engine.graphs.cuda_graphs.capture import Capture
from compiled_engine.graphs.cuda_graphs.counters import Fallback, GraphCounters
from compiled_engine.graphs.cuda_graphs.dispatcher import Dispatcher
from compiled_engine.graphs.cuda_graphs.key import GraphKey, GraphKind, KeyField
from compiled_engine.graphs.cuda_graphs.manager import CudaGraphManager
from compiled_engine.runner.input_batch import (
    InputBatch,
    InputBuffers,
    empty_batch,
    prepare,
    step_of_batch,
)
from compiled_engine.runner.model_forward import ForwardOutput, ModelForward
from compiled_engine.runner.ngram import NgramProposer
from compiled_engine.runner.request_states import RequestStates
from compiled_engine.runner.step_sampling import StepSampling

log = logging.getLogger("compiled_engine")
# The pool of the graphs may take this share of what the KV cache would have without it.
POOL_SHARE = 0.125


# Steps with adapters have graphs of their own; what is in the slots, and at which ranks, the device reads.
ADAPTERS = KeyField("adapters", (1,))


class PaddedStep:
    """Implements `GraphStep`. kv_caches: one tensor a layer; the list may be refilled until the first capture.

    attention_case: the case for which attention's work is planned; None if each layer plans its own. samples: whether
    the result is logits, not the input of the next pipeline stage. proposer: launches drafts; None where there are
    none, or where the host knows them.
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
        proposer: NgramProposer | None = None,
    ):
        self.model, self.sampling, self.states = model, sampling, states
        self.buffers, self.kv_caches = buffers, kv_caches
        self._backend, self._case, self._max_model_len = attention_backend, attention_case, max_model_len
        self.samples, self.proposer = samples, proposer

    def fill(self, key: GraphKey) -> None:
        batch = self._empty(key)
        self.states.writes.apply()
        self.prepared_inputs(batch)

    def run(self, key: GraphKey) -> torch.Tensor:
        """Run the part of a step that the key's graph holds.

        A decode key: drafts, input preparation, forward, logits, sampling by temperature and seed, advance of the
        states; stages without sampling run only their part. Another full key: drafts, input preparation and forward.
        Any other: the forward of inputs that are there.
        """
        return self._run(key, distinct=False)

    def warm_up(self, key: GraphKey) -> None:
        """Do what `run` does, but call each kind of layer once: layers of a kind run the same kernels."""
        self._run(key, distinct=True)

    def _run(self, key: GraphKey, *, distinct: bool) -> torch.Tensor:
        batch = self._empty(key)
        self.states.writes.discard()  # `fill` made these writes
        if key.kind is GraphKind.FULL:
            self.prepare(batch)
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
            adapted=batch.adapted,
        )

    def prepare(self, batch: InputBatch) -> None:
        """Make the drafts and the inputs of a batch on the device from what was staged and applied."""
        if self.proposer is not None:
            self.proposer.launch(batch, self.buffers)
        prepare(batch, self.states, self.buffers)

    def prepared_inputs(self, batch: InputBatch) -> AttentionInputs:
        """Make the batch's inputs from what was staged, and plan attention's work."""
        self.prepare(batch)
        inputs = attention_inputs_of(step_of_batch(batch, self.buffers), self._backend)
        self._plan(inputs)
        return inputs

    def output(self, key: GraphKey, result: torch.Tensor) -> ForwardOutput:
        """Wrap what `run` returned, or a replay left, for a key."""
        return ForwardOutput(
            result, key.is_decode or self.model.ends_at_logits(key.num_tokens, adapted=len(key.extra) > 0)
        )

    def addresses(self) -> tuple[int, ...]:
        """Return those of a buffer for each use, and of the first and last cache: all are replaced together. Layers
        that do not attend have empty ones."""
        buffers, caches = self.buffers, [cache for cache in self.kv_caches if cache.numel()]
        read = (buffers.input_ids_T, buffers.slot_mapping_T, buffers.rows_R, self.states.last_token_S)
        return tuple(tensor.data_ptr() for tensor in (*read, *caches[:1], *caches[-1:]))

    def _plan(self, inputs: AttentionInputs) -> None:
        if self._case is not None:
            get_backend(self._backend).plan(inputs, self._case)

    def _empty(self, key: GraphKey) -> InputBatch:
        if key.kind is GraphKind.FULL:
            host = (key.num_decodes, key.max_query_len, key.max_seq_len)
            return empty_batch(self.buffers, key.num_tokens, key.num_requests, host, key)
        # Attention is not captured, only warmed up.
        return empty_batch(self.buffers, key.num_tokens, 1, (0, key.num_tokens, self._max_model_len), key)


def affordable(
    config: EngineConfig, activation_bytes: int, left_bytes: int | None, least: Callable[[int], int]
) -> GraphConfig:
    """The graphs to capture: of mixed batches those alone that the memory allows, on every rank.

    activation_bytes: peak of a step of max_num_batched_tokens, which a pool follows in proportion to the tokens.
    left_bytes: for that and the KV cache, without graphs; None where memory does not matter. least: of all ranks.
    """
    if left_bytes is None:
        return config.graph
    most_bytes = POOL_SHARE * (left_bytes - activation_bytes)
    per_token = activation_bytes / config.scheduler.max_num_batched_tokens
    sizes = config.graph.token_sizes
    kept = sizes[: least(sum(size * per_token <= most_bytes for size in sizes))]  # they ascend
    if len(kept) < len(sizes):
        log.warning(
            "no CUDA graphs of more than %d tokens: their pool would take more than %.0f %% of the KV cache's memory",
            kept[-1] if kept else 0,
            100 * POOL_SHARE,
        )
    return replace(config.graph, token_sizes=kept)


class CapturedSteps:
    """`graphs` is None where nothing is captured."""

    def __init__(self, config: EngineConfig, graph: GraphConfig, step: PaddedStep, capture: Capture | None):
        self._step = step
        fields = () if config.adapters is None else (ADAPTERS,)
        self.dispatcher = Dispatcher(graph, config.scheduler, fields, config.most_new_tokens)
        in_parts = any(key.kind is not GraphKind.FULL for key in self.dispatcher.keys)
        by_request = [tensor.name for tensor in step.buffers.asked if tensor.dims[0] == "requests"]
        if in_parts and by_request:  # their number is not that of the capture
            raise ValueError(
                f"graph_mode is {graph.mode.value!r}, but step tensor {by_request[0]} has a value for each request: "
                "only full graphs have a fixed number of requests; allowed: full, full_decode_only, none"
            )
        self.counters = GraphCounters(self.dispatcher)
        self.graphs = None
        if capture is not None:
            self.graphs = CudaGraphManager(self.dispatcher.keys, capture, step)

    def graph_for(
        self,
        num_tokens: int,
        num_requests: int,
        longest: int,
        hidden_wanted: bool,
        *,
        adapted: bool = False,
        queries: int | None = None,
    ) -> GraphKey | None:
        """The graph to replay for a batch with contexts of up to `longest`; why there is none is counted. adapted: a
        request has an adapter. queries: a token and drafts of each request, if all have as many."""
        if queries is None and num_tokens == num_requests:
            queries = 1
        decodes_only = queries is not None
        self.counters.batch(num_tokens, decodes_only)
        values = {ADAPTERS.name: 1} if adapted else None
        key = self.dispatcher.dispatch(num_tokens, num_requests, queries, longest, values)
        if key is None:
            self.counters.no_key(num_tokens, decodes_only)
        elif hidden_wanted and (key.is_decode or self._step.model.ends_at_logits(key.num_tokens, adapted=adapted)):
            self.counters.fallback(Fallback.PROMPT_LOGPROBS, key.name)
        else:
            return key
        return None

    def forward(self, batch: InputBatch, hidden_wanted: bool) -> ForwardOutput:
        """Replay the graph if the batch has a key; otherwise run the forward. hidden_wanted: return no logits."""
        if batch.key is not None:
            return self.replay(batch)
        self._step.prepare(batch)
        return self._step.forward(batch, hidden_wanted=hidden_wanted)

    def replay(self, batch: InputBatch) -> ForwardOutput:
        """Replay the forward of a batch that has a key, on what was staged; of decodes the whole step."""
        assert self.graphs is not None
        assert batch.key is not None
        # The inputs of a full graph are made in it.
        inputs = None if batch.key.kind is GraphKind.FULL else self._step.prepared_inputs(batch)
        output = self._step.output(batch.key, self.graphs.replay(batch.key, inputs))
        self.counters.replay(batch.key, batch.num_tokens)
        return output
