"""CUDA graphs of steps: what is captured, which graph serves a batch, and its replay.

A graph of decodes holds the whole step, another full graph the forward with its inputs, graphs in parts the forward
alone. Features may have further graphs, and launches in those of steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.config import EngineConfig, GraphConfig
from compiled_engine.engine.forward import BatchForward, ForwardOutput
from compiled_engine.engine.input_batch import InputBatch, empty_batch, prepare
from compiled_engine.engine.request_states import RequestStates
from compiled_engine.engine.step_hooks import NO_HOOKS, StepHooks, Tail
from compiled_engine.graphs.cuda_graphs.capture import Capture
from compiled_engine.graphs.cuda_graphs.dispatcher import Dispatcher, GraphKey, GraphKind, KeyField
from compiled_engine.graphs.cuda_graphs.manager import Capturable, CudaGraphManager, Fallback, GraphCounters

log = logging.getLogger("compiled_engine")
# Largest share of the KV cache's memory that the graphs' pool may take.
POOL_SHARE = 0.125


class ModelStep:
    """Implements `Capturable`. forward: its list of kv_caches may be refilled until the first capture. hooks: of the
    features whose launches belong to the step.
    """

    def __init__(
        self,
        forward: BatchForward,
        tail: Tail,
        states: RequestStates,
        max_model_len: int,
        hooks: StepHooks = NO_HOOKS,
    ):
        self.forward, self.tail, self.states = forward, tail, states
        self.model, self.buffers, self.kv_caches = forward.model, forward.buffers, forward.kv_caches
        self._max_model_len, self._hooks = max_model_len, hooks

    def fill(self, key: GraphKey) -> None:
        batch = self._empty(key)
        self.states.writes.apply()
        self.prepared_inputs(batch)

    def run(self, key: GraphKey) -> torch.Tensor:
        """Run the part of a step that the key's graph holds.

        A decode key: input preparation, forward, and the graphed part of the tail. Another full key: input preparation
        and forward. Any other: the forward of inputs that are there. Launches of features are with the inputs and the
        forward.
        """
        return self._run(key, distinct=False)

    def warm_up(self, key: GraphKey) -> None:
        """Do what `run` does with one call per kind of layer, as layers of a kind run the same kernels."""
        self._run(key, distinct=True)

    def _run(self, key: GraphKey, *, distinct: bool) -> torch.Tensor:
        batch = self._empty(key)
        self.states.writes.discard()  # `fill` made these writes
        if key.kind is GraphKind.FULL:
            self.prepare(batch)
        output = self.forward(batch, around_attention=key.kind is not GraphKind.FULL, distinct=distinct)
        for in_forward in self._hooks.in_forward:
            in_forward(batch, output)
        return self.tail.launch_captured(output, batch, batch.num_rows) if key.is_decode else output.tensor

    def prepare(self, batch: InputBatch) -> None:
        """Make the inputs of a batch on the device from what was staged and applied."""
        for before_inputs in self._hooks.before_inputs:
            before_inputs(batch)
        prepare(batch, self.states, self.buffers)

    def prepared_inputs(self, batch: InputBatch) -> AttentionInputs:
        """Make the batch's inputs, and plan attention's work."""
        self.prepare(batch)
        return self.forward.planned_inputs(batch)

    def output(self, key: GraphKey, result: torch.Tensor, variant: str = "") -> ForwardOutput:
        """Wrap the result of `run` or of a replay, for a key and its variant."""
        is_logits = key.is_decode or self.model.ends_at_logits(key.num_tokens, variant)
        beside = self.buffers.beside(variant, key.num_tokens) if variant else ()
        return ForwardOutput(result, is_logits, (), variant, beside)

    def tensor_ids(self) -> tuple[int, ...]:
        """See Capturable. All caches are replaced together."""
        buffers, caches = self.buffers, self.kv_caches
        read = (buffers.input_ids_T, buffers.slot_mapping_T, buffers.rows_R, self.states.last_token_S)
        return tuple(map(id, (*read, *caches[:1], *caches[-1:])))

    def _empty(self, key: GraphKey) -> InputBatch:
        if key.kind is GraphKind.FULL:
            host = (key.num_decodes, key.max_query_len, key.max_seq_len)
            return empty_batch(self.buffers, key.num_tokens, key.num_requests, host, key)
        # Attention is not captured, only warmed up.
        return empty_batch(self.buffers, key.num_tokens, 1, (0, key.num_tokens, self._max_model_len), key)


def affordable(
    config: EngineConfig, activation_bytes: int, left_bytes: int | None, all_reduce_min: Callable[[int], int]
) -> GraphConfig:
    """Return the graphs to capture, leaving out sizes of mixed batches for which some rank lacks the memory.

    activation_bytes: peak of a step of max_num_batched_tokens; a pool grows in proportion to its tokens. left_bytes:
    for that and the KV cache, without graphs; None if memory is no limit. all_reduce_min: minimum over all ranks.
    """
    if left_bytes is None:
        return config.graph
    most_bytes = POOL_SHARE * (left_bytes - activation_bytes)
    per_token = activation_bytes / config.scheduler.max_num_batched_tokens
    sizes = config.graph.token_sizes
    kept = sizes[: all_reduce_min(sum(size * per_token <= most_bytes for size in sizes))]  # sizes ascend
    if len(kept) < len(sizes):
        log.warning(
            "no CUDA graphs of more than %d tokens: their pool would take more than %.0f %% of the KV cache's memory",
            kept[-1] if kept else 0,
            100 * POOL_SHARE,
        )
    return replace(config.graph, token_sizes=kept)


class StepGraphs:
    """Chooses and replays the graphs of steps, or runs a step without one. `graphs`: None where nothing is captured."""

    def __init__(
        self,
        config: EngineConfig,
        graph: GraphConfig,
        step: ModelStep,
        capture: Capture | None,
        hooks: StepHooks = NO_HOOKS,
    ):
        self._step, self._in_forward = step, hooks.in_forward
        # Steps of a variant have graphs of their own.
        fields = tuple(KeyField(variant, (1,)) for variant in step.model.variants if variant)
        self.dispatcher = Dispatcher(graph, config.scheduler, fields, config.query_lens, config.rare_query_lens)
        in_parts = any(key.kind is not GraphKind.FULL for key in self.dispatcher.keys)
        asked = {tensor for tensors in step.buffers.asked.values() for tensor in tensors}
        by_request = sorted(tensor.name for tensor in asked if tensor.dims[0] == "requests")
        if in_parts and by_request:  # the number of requests differs from the capture's
            raise ValueError(
                f"graph_mode is {graph.mode.value!r}, but step tensor {by_request[0]} has a value for each request: "
                "only full graphs have a fixed number of requests; allowed: full, full_decode_only, none"
            )
        self.counters = GraphCounters(self.dispatcher)
        keys: Sequence[GraphKey] = self.dispatcher.keys
        of_features: dict[GraphKey, Capturable] = {}
        for graphs in hooks.graphs:
            found = graphs(keys, self._replay)
            keys = found.of_steps
            of_features |= found.own
        steps = {**dict.fromkeys(keys, step), **of_features}
        self.graphs = CudaGraphManager(steps, capture) if capture is not None else None

    def graph_for(
        self,
        num_tokens: int,
        num_requests: int,
        longest: int,
        hidden_wanted: bool,
        *,
        variant: str = "",
        query_len: int | None = None,
    ) -> GraphKey | None:
        """The graph to replay for a batch with contexts of up to `longest`; why there is none is counted. variant: of
        the forward. query_len: rows of each request, if all have as many, of a token each."""
        if query_len is None and num_tokens == num_requests:
            query_len = 1
        decodes_only = query_len is not None
        self.counters.batch(num_tokens, decodes_only)
        values = {variant: 1} if variant else None
        key = self.dispatcher.dispatch(num_tokens, num_requests, query_len, longest, values)
        if key is None:
            self.counters.no_key(num_tokens, decodes_only)
        elif hidden_wanted and (key.is_decode or self._step.model.ends_at_logits(key.num_tokens, variant)):
            self.counters.fallback(Fallback.HIDDEN_STATES, key.name)
        else:
            return key
        return None

    def forward(self, batch: InputBatch, hidden_wanted: bool) -> ForwardOutput:
        """Replay the batch's graph on the staged inputs (for decodes the whole step), or without a key run the forward.

        hidden_wanted: return no logits.
        """
        if (key := batch.key) is not None:
            assert self.graphs is not None
            # A full graph prepares its own inputs.
            inputs = None if key.kind is GraphKind.FULL else self._step.prepared_inputs(batch)
            output = self._step.output(key, self.graphs.replay(key, inputs), batch.variant)
            self.counters.replay(key, batch.num_tokens)
            return output
        self._step.prepare(batch)
        output = self._step.forward(batch, hidden_wanted=hidden_wanted)
        for in_forward in self._in_forward:
            in_forward(batch, output)
        return output

    def _replay(self, key: GraphKey, num_tokens: int) -> torch.Tensor:
        """Replay a feature's graph, for this many tokens."""
        assert self.graphs is not None
        result = self.graphs.replay(key, None)
        self.counters.replay(key, num_tokens)
        return result
