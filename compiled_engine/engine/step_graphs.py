"""Captures steps as CUDA graphs (`ModelStep`), chooses the graph that serves a batch, and replays it (`StepGraphs`).

A decode graph holds the whole step: input preparation, forward, and sampling by temperature. Any other full graph holds
input preparation and forward; a piecewise or breakable graph holds the forward between attention ops. Features may add
launches to these graphs, and have further graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.config import EngineConfig, GraphMode
from compiled_engine.engine.forward import ForwardOutput, ModelForward
from compiled_engine.engine.input_batch import InputBatch, InputBuffers, empty_batch, prepare, stage_empty
from compiled_engine.engine.request_states import RequestStates
from compiled_engine.engine.step_hooks import NO_HOOKS, StepHooks, Tail
from compiled_engine.graphs.compiler.signature import OF_PROMPTS
from compiled_engine.graphs.cuda_graphs.capture import Capture
from compiled_engine.graphs.cuda_graphs.dispatcher import Dispatcher, GraphKey, GraphKind, KeyField, prompt_sizes
from compiled_engine.graphs.cuda_graphs.manager import Capturable, CudaGraphManager, Fallback, GraphCounters

log = logging.getLogger("compiled_engine")
# Largest part of the KV cache's memory that the graphs' pool may take.
POOL_SHARE = 0.125


class ModelStep:
    """Launches the parts of a step, and implements `Capturable`, so that CUDA graphs can capture these launches.

    model: the tensors in its kv_caches may be replaced until the first capture. hooks: features' launches in the step.
    """

    def __init__(
        self,
        model: ModelForward,
        buffers: InputBuffers,
        tail: Tail,
        states: RequestStates,
        max_model_len: int,
        hooks: StepHooks = NO_HOOKS,
    ):
        self.model, self.buffers, self.tail, self.states = model, buffers, tail, states
        self._max_model_len, self._hooks = max_model_len, hooks

    def fill(self, key: GraphKey) -> None:
        batch = self._empty(key)
        stage_empty(batch, self.buffers)
        self.states.writes.apply()
        self.prepared_inputs(batch)

    def run(self, key: GraphKey) -> torch.Tensor:
        """Run the part of a step that the key's graph holds, see the module's docstring, and return its result.

        Unless the graph is a full one, the inputs must have been prepared.
        """
        return self._run(key, distinct=False)

    def warm_up(self, key: GraphKey) -> None:
        """Do the work of `run` with only one layer of each kind, since layers of the same kind run the same kernels."""
        self._run(key, distinct=True)

    def _run(self, key: GraphKey, *, distinct: bool) -> torch.Tensor:
        batch = self._empty(key)
        if key.kind is GraphKind.FULL:
            self.prepare(batch)
        in_parts = key.kind is not GraphKind.FULL
        output = self.model.forward(batch, self.buffers, around_attention=in_parts, distinct=distinct)
        for in_forward in self._hooks.in_forward:
            in_forward(batch, output)
        return self.tail.launch_first(batch, output, batch.num_rows) if key.is_decode else output.tensor

    def prepare(self, batch: InputBatch) -> None:
        """Compute a batch's inputs on the device. The batch's staged writes must have been applied."""
        for before_inputs in self._hooks.before_inputs:
            before_inputs(batch)
        prepare(batch, self.states, self.buffers)

    def prepared_inputs(self, batch: InputBatch) -> AttentionInputs:
        """Compute the batch's inputs on the device, plan its attention, and return the attention inputs."""
        self.prepare(batch)
        return self.model.planned_inputs(batch, self.buffers)

    def output(self, key: GraphKey, result: torch.Tensor, variant: str = "") -> ForwardOutput:
        """Return the result of `run`, or of a replay of the key's graph, as a ForwardOutput."""
        is_logits = key.is_decode or self.model.ends_at_logits(key.num_tokens, variant)
        logits_inputs = self.buffers.logits_inputs(variant, key.num_tokens) if variant else ()
        return ForwardOutput(result, is_logits, (), variant, logits_inputs)

    def tensor_ids(self) -> tuple[int, ...]:
        """Return the `id` of each tensor that a graph reads, see Capturable.

        Of the KV caches, only the first and the last are included, since all are replaced together.
        """
        buffers, caches = self.buffers, self.model.kv_caches
        read = (buffers.input_ids_T, buffers.slot_mapping_T, buffers.rows_R, self.states.last_token_S)
        return tuple(map(id, (*read, *caches[:1], *caches[-1:])))

    def _empty(self, key: GraphKey) -> InputBatch:
        if key.kind is GraphKind.FULL:
            host = (key.num_decodes, key.max_query_len, key.max_seq_len)
            return empty_batch(self.buffers, key.num_tokens, key.num_rows, host, key)
        # Attention is not captured, only warmed up.
        return empty_batch(self.buffers, key.num_tokens, 1, (0, key.num_tokens, self._max_model_len), key)


def affordable(
    config: EngineConfig, activation_bytes: int, left_bytes: int | None, all_reduce_min: Callable[[int], int]
) -> tuple[int, ...]:
    """Return the sizes of config.graph.token_sizes whose graphs take at most POOL_SHARE of the KV cache's memory.

    This holds on every rank. A graph's memory is assumed to be proportional to its tokens. activation_bytes: peak
    memory of a step of max_num_batched_tokens. left_bytes: memory for activations and KV cache, without graphs; None:
    no limit. all_reduce_min: returns the minimum of a number over all ranks.
    """
    sizes = config.graph.token_sizes
    if left_bytes is None:
        return sizes
    most_bytes = POOL_SHARE * (left_bytes - activation_bytes)
    per_token = activation_bytes / config.scheduler.max_num_batched_tokens
    kept = sizes[: all_reduce_min(sum(size * per_token <= most_bytes for size in sizes))]  # sizes ascend
    if len(kept) < len(sizes):
        log.warning(
            "no CUDA graphs of more than %d tokens: their pool would take more than %.0f %% of the KV cache's memory",
            kept[-1] if kept else 0,
            100 * POOL_SHARE,
        )
    return kept


class StepGraphs:
    """Chooses the graph of each step and replays it, or runs the step without a graph.

    token_sizes: the sizes of config.graph.token_sizes that are captured. graphs: all captured graphs, of steps and of
    features; None if nothing is captured.
    """

    def __init__(
        self,
        config: EngineConfig,
        token_sizes: Sequence[int],
        step: ModelStep,
        capture: Capture | None,
        hooks: StepHooks = NO_HOOKS,
    ):
        self._step, self._in_forward = step, hooks.in_forward
        # Steps of a variant have graphs of their own.
        few = prompt_sizes(token_sizes) if config.graph.mode is GraphMode.FULL else ()
        fields = tuple(
            KeyField(variant, (1,), few if variant in OF_PROMPTS else None)
            for variant in step.model.variants
            if variant
        )
        self.dispatcher = Dispatcher(
            config.graph, config.scheduler, fields, config.query_lens, config.rare_query_lens, token_sizes
        )
        in_parts = any(key.kind is not GraphKind.FULL for key in self.dispatcher.keys)
        asked = {tensor for tensors in step.buffers.asked.values() for tensor in tensors}
        by_request = sorted(tensor.name for tensor in asked if tensor.dims[0] == "requests")
        if in_parts and by_request:  # the number of requests differs from the capture's
            raise ValueError(
                f"graph_mode is {config.graph.mode.value!r}, but step tensor {by_request[0]} has a value for each "
                "request: only full graphs have a fixed number of requests; allowed: full, full_decode_only, none"
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
        """Return the key of the graph to replay for a batch; None if the batch runs without a graph.

        Counts the batch for the metrics, with the reason if it has no graph. longest: the longest context, this step's
        tokens included. hidden_wanted: the step needs hidden states. variant: the forward's variant. query_len: rows
        per request, if all requests have the same number and each row has one token; None otherwise.
        """
        if query_len is None and num_tokens == num_requests:
            query_len = 1
        decodes_only = query_len is not None
        self.counters.batch(num_tokens, decodes_only)
        values = {variant: 1} if variant else None
        key = self.dispatcher.dispatch(num_tokens, num_requests, query_len, longest, values)
        if key is None:
            self.counters.no_key(num_tokens, decodes_only, variant)
        elif hidden_wanted and (key.is_decode or self._step.model.ends_at_logits(key.num_tokens, variant)):
            self.counters.fallback(Fallback.HIDDEN_STATES, key.name)
        else:
            return key
        return None

    def run(self, batch: InputBatch, hidden_wanted: bool) -> ForwardOutput:
        """Prepare the batch's inputs and run the forward, by a replay if the batch has a graph. Returns the output.

        A decode graph also samples and advances the states, see `Tail.launch_first`. The staged writes must have been
        applied. hidden_wanted: return hidden states rather than logits.
        """
        if (key := batch.key) is not None:
            assert self.graphs is not None
            # A full graph prepares its own inputs.
            inputs = None if key.kind is GraphKind.FULL else self._step.prepared_inputs(batch)
            output = self._step.output(key, self.graphs.replay(key, inputs), batch.variant)
            self.counters.replay(key, batch.num_tokens)
            return output
        self._step.prepare(batch)
        output = self._step.model.forward(batch, self._step.buffers, hidden_wanted=hidden_wanted)
        for in_forward in self._in_forward:
            in_forward(batch, output)
        return output

    def _replay(self, key: GraphKey, num_tokens: int) -> torch.Tensor:
        """Replay a feature's graph for a batch of `num_tokens` tokens, and return the graph's result."""
        assert self.graphs is not None
        result = self.graphs.replay(key, None)
        self.counters.replay(key, num_tokens)
        return result
