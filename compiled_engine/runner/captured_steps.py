"""The captured graphs of steps: which one serves a batch, its replay, and what became of the batches."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from compiled_engine.config import EngineConfig, GraphConfig
from compiled_engine.graphs.cuda_graphs.capture import Capture
from compiled_engine.graphs.cuda_graphs.counters import Fallback, GraphCounters
from compiled_engine.graphs.cuda_graphs.dispatcher import Dispatcher
from compiled_engine.graphs.cuda_graphs.key import GraphKey, GraphKind
from compiled_engine.graphs.cuda_graphs.manager import CudaGraphManager
from compiled_engine.runner.input_batch import InputBatch, prepare
from compiled_engine.runner.model_forward import ForwardOutput
from compiled_engine.runner.padded_step import PaddedStep

log = logging.getLogger("compiled_engine")

# The pool of the graphs may take this share of what the KV cache would have without it.
POOL_SHARE = 0.125


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
        self.dispatcher = Dispatcher(graph, config.scheduler)
        in_parts = any(key.kind is not GraphKind.FULL for key in self.dispatcher.keys)
        by_request = [tensor.name for tensor in step.buffers.asked if tensor.dims[0] == "requests"]
        if in_parts and by_request:  # their number is not that of the capture
            raise ValueError(
                f"graph_mode is {graph.mode.value!r}, but step tensor {by_request[0]} has a value for each request: "
                "full graphs alone have a fixed number of requests; allowed: full, full_decode_only, none"
            )
        self.counters = GraphCounters(self.dispatcher)
        self.graphs = None
        if capture is not None:
            self.graphs = CudaGraphManager(self.dispatcher.keys, capture, step, graph.background)

    def graph_for(self, num_tokens: int, num_requests: int, longest: int, hidden_wanted: bool) -> GraphKey | None:
        """The graph to replay for a batch with contexts of up to `longest`; why there is none is counted."""
        decodes_only = num_tokens == num_requests
        self.counters.batch(num_tokens, decodes_only)
        keys = self.dispatcher.dispatch(num_tokens, num_requests, 1 if decodes_only else None, longest)
        if not keys:
            self.counters.no_key(num_tokens, decodes_only)
            return None
        assert self.graphs is not None
        key = next(filter(self.graphs.has, keys), None)
        if hidden_wanted and (keys[0].is_decode or self._step.model.ends_at_logits(keys[0].num_tokens)):
            reason = Fallback.PROMPT_LOGPROBS
        elif key is not None:
            return key
        else:
            reason = Fallback.LOST if all(map(self.graphs.is_lost, keys)) else Fallback.NOT_YET
        self.counters.fallback(reason, keys[0].name)
        return None

    def forward(self, batch: InputBatch, hidden_wanted: bool) -> ForwardOutput:
        """Of a batch with a key its replay, of others what that would do. hidden_wanted: logits will not do."""
        if batch.key is not None:
            return self.replay(batch)
        prepare(batch, self._step.states, self._step.buffers)
        return self._step.forward(batch, hidden_wanted=hidden_wanted)

    def replay(self, batch: InputBatch) -> ForwardOutput:
        """The forward of a batch that has a key, on what was staged; of decodes the whole step."""
        assert self.graphs is not None
        assert batch.key is not None
        # The inputs of a full graph are made in it.
        inputs = None if batch.key.kind is GraphKind.FULL else self._step.prepared_inputs(batch)
        output = self._step.output(batch.key, self.graphs.replay(batch.key, inputs))
        self.counters.replay(batch.key, batch.num_tokens)
        return output

    def capture_next(self) -> bool:
        """In the background, if one is left and it is time; whether anything ran."""
        return self.graphs is not None and not self.graphs.complete and self.graphs.capture_in_background()
