"""CUDA graphs of steps: what is captured, which graph serves a batch, and its replay.

A graph of decodes holds the whole step, another full graph the forward with its inputs, graphs in parts the forward
alone, and the graph of a draft model or a head all of its passes that make a step's drafts. A further graph of a head
computes the tokens of a step behind it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.config import EngineConfig, GraphConfig
from compiled_engine.graphs.cuda_graphs.capture import Capture
from compiled_engine.graphs.cuda_graphs.counters import Fallback, GraphCounters
from compiled_engine.graphs.cuda_graphs.dispatcher import Dispatcher
from compiled_engine.graphs.cuda_graphs.draft_keys import StepKeys
from compiled_engine.graphs.cuda_graphs.key import GraphKey, GraphKind, KeyField
from compiled_engine.graphs.cuda_graphs.manager import Capturable, CudaGraphManager
from compiled_engine.runner.draft_model import Drafting, DraftModelProposer
from compiled_engine.runner.eagle_drafter import EagleDrafter
from compiled_engine.runner.hooks import Tail
from compiled_engine.runner.input_batch import InputBatch, empty_batch, prepare
from compiled_engine.runner.model_forward import BatchForward, ForwardOutput
from compiled_engine.runner.ngram import NgramProposer
from compiled_engine.runner.request_states import RequestStates

log = logging.getLogger("compiled_engine")
# The pool of the graphs may take this share of what the KV cache would have without it.
POOL_SHARE = 0.125


class ModelStep:
    """Implements `Capturable`. forward: its list of kv_caches may be refilled until the first capture. proposer:
    launches drafts in the step; None where there are none, or where they are there before. head: takes what it reads
    of the forward.
    """

    def __init__(
        self,
        forward: BatchForward,
        tail: Tail,
        states: RequestStates,
        max_model_len: int,
        proposer: NgramProposer | None = None,
        head: EagleDrafter | None = None,
    ):
        self.forward, self.tail, self.states = forward, tail, states
        self.model, self.buffers, self.kv_caches = forward.model, forward.buffers, forward.kv_caches
        self._max_model_len = max_model_len
        self.proposer, self.head = proposer, head

    def fill(self, key: GraphKey) -> None:
        batch = self._empty(key)
        self.states.writes.apply()
        self.prepared_inputs(batch)

    def run(self, key: GraphKey) -> torch.Tensor:
        """Run the part of a step that the key's graph holds.

        A decode key: drafts, input preparation, forward, and the captured part of the tail. Another full key: drafts,
        input preparation and forward. Any other: the forward of inputs that are there.
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
        if self.head is not None and not batch.no_head:
            self.head.combine_hidden_states(output.aux_hidden_states)
        return self.tail.launch_captured(output, batch, batch.num_rows) if key.is_decode else output.tensor

    def prepare(self, batch: InputBatch) -> None:
        """Make the drafts and the inputs of a batch on the device from what was staged and applied."""
        if self.proposer is not None and not (batch.decodes_only and batch.host[1] == 1):  # the queries of a request
            self.proposer.launch(batch, self.buffers)
        prepare(batch, self.states, self.buffers)

    def prepared_inputs(self, batch: InputBatch) -> AttentionInputs:
        """Make the batch's inputs from what was staged, and plan attention's work."""
        self.prepare(batch)
        return self.forward.planned_inputs(batch)

    def output(self, key: GraphKey, result: torch.Tensor, variant: str = "") -> ForwardOutput:
        """Wrap what `run` returned, or a replay left, for a key and its variant."""
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
    """The graphs to capture: of mixed batches those alone that the memory allows, on every rank.

    activation_bytes: peak of a step of max_num_batched_tokens, which a pool follows in proportion to the tokens.
    left_bytes: for that and the KV cache, without graphs; None where memory does not matter. all_reduce_min: over
    all ranks.
    """
    if left_bytes is None:
        return config.graph
    most_bytes = POOL_SHARE * (left_bytes - activation_bytes)
    per_token = activation_bytes / config.scheduler.max_num_batched_tokens
    sizes = config.graph.token_sizes
    kept = sizes[: all_reduce_min(sum(size * per_token <= most_bytes for size in sizes))]  # they ascend
    if len(kept) < len(sizes):
        log.warning(
            "no CUDA graphs of more than %d tokens: their pool would take more than %.0f %% of the KV cache's memory",
            kept[-1] if kept else 0,
            100 * POOL_SHARE,
        )
    return replace(config.graph, token_sizes=kept)


@dataclass(frozen=True)
class _EitherStep:
    """Implements `Capturable` for the keys of the engine's model and of its draft model or head."""

    own: ModelStep
    draft: DraftModelProposer | EagleDrafter

    def _of(self, key: GraphKey) -> Capturable:
        return self.draft if key.drafts or key.prefills_head else self.own

    def fill(self, key: GraphKey) -> None:
        self._of(key).fill(key)

    def warm_up(self, key: GraphKey) -> None:
        self._of(key).warm_up(key)

    def run(self, key: GraphKey) -> torch.Tensor:
        return self._of(key).run(key)

    def tensor_ids(self) -> tuple[int, ...]:
        return self.own.tensor_ids() + self.draft.tensor_ids()


class StepGraphs:
    """Chooses and replays the graphs of steps, or runs a step without one. `graphs`: None where nothing is captured.
    draft: its passes are captured beside the steps."""

    def __init__(
        self,
        config: EngineConfig,
        graph: GraphConfig,
        step: ModelStep,
        capture: Capture | None,
        draft: DraftModelProposer | EagleDrafter | None = None,
    ):
        self._step, self._draft = step, draft
        # Steps of a variant have graphs of their own.
        fields = tuple(KeyField(variant, (1,)) for variant in step.model.variants if variant)
        speculation = config.speculation
        self.dispatcher = Dispatcher(graph, config.scheduler, fields, speculation.verified, speculation.rare)
        self._keys = StepKeys.of(self.dispatcher, config.scheduler.max_model_len, speculation.sizes_read)
        in_parts = any(key.kind is not GraphKind.FULL for key in self.dispatcher.keys)
        asked = {tensor for tensors in step.buffers.asked.values() for tensor in tensors}
        by_request = sorted(tensor.name for tensor in asked if tensor.dims[0] == "requests")
        if in_parts and by_request:  # their number is not that of the capture
            raise ValueError(
                f"graph_mode is {graph.mode.value!r}, but step tensor {by_request[0]} has a value for each request: "
                "only full graphs have a fixed number of requests; allowed: full, full_decode_only, none"
            )
        self.counters = GraphCounters(self.dispatcher)
        self.graphs = None
        if capture is not None:
            both = step if draft is None else _EitherStep(step, draft)
            self.graphs = CudaGraphManager((*self._keys.captured, *(draft.keys if draft else ())), capture, both)

    def graph_for(
        self,
        num_tokens: int,
        num_requests: int,
        longest: int,
        hidden_wanted: bool,
        *,
        variant: str = "",
        query_len: int | None = None,
        no_head: bool = False,
    ) -> GraphKey | None:
        """The graph to replay for a batch with contexts of up to `longest`; why there is none is counted. variant: of
        the forward. query_len: a token and drafts of each request, if all have as many. no_head: see InputBatch."""
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
            return (self._keys.no_head if no_head else self._keys.read)[key]
        return None

    def draft(self, drafting: Drafting) -> None:
        """Let the draft model or the head make a step's drafts: by one launch, but for prompts."""
        assert self._draft is not None
        if (key := drafting.key) is None:
            self._draft.draft(drafting)
        else:
            assert self.graphs is not None
            self.graphs.replay(key, None)
            self.counters.replay(key, drafting.num_tokens)
        self._draft.read_prompts(drafting)

    def prefill_head(self, batch: InputBatch) -> None:
        """Let the head, if there is one and the step does not skip it, compute the step's tokens, which the states
        have: by one launch after decodes."""
        head = self._step.head
        if head is None or batch.no_head:
            return
        key = None if batch.key is None else head.key_to_prefill_head(batch.key)
        if key is None:
            head.prefill_head(batch)
        else:
            assert self.graphs is not None
            self.graphs.replay(key, None)
            self.counters.replay(key, batch.num_tokens)

    def forward(self, batch: InputBatch, hidden_wanted: bool) -> ForwardOutput:
        """Replay the graph if the batch has a key, on what was staged: of decodes the whole step. Otherwise run the
        forward; hidden_wanted: return no logits."""
        if (key := batch.key) is not None:
            assert self.graphs is not None
            # The inputs of a full graph are made in it.
            inputs = None if key.kind is GraphKind.FULL else self._step.prepared_inputs(batch)
            output = self._step.output(key, self.graphs.replay(key, inputs), batch.variant)
            self.counters.replay(key, batch.num_tokens)
            return output
        self._step.prepare(batch)
        output = self._step.forward(batch, hidden_wanted=hidden_wanted)
        if (head := self._step.head) is not None and not batch.no_head:
            head.combine_hidden_states(output.aux_hidden_states)
        return output
