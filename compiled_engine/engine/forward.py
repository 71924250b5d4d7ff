"""Runs a rank's model on batches.

`ModelForward` has a table of functions, made at the start. Each batch calls one of them. A forward has variants: the
usual one, "", and others that features choose for a step. Each variant can run whole, or in parts between attention
ops, so that attention is not captured in a CUDA graph. It can run all layers, or, to warm up, one of each kind. A
compiled forward of few tokens returns the logits of all tokens. Any other forward returns hidden states, from which the
logits of some tokens are then computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import NamedTuple

import torch

from compiled_engine.attention.backend import get_backend
from compiled_engine.attention.case import cases_of, planned_together
from compiled_engine.attention.inputs import AttentionInputs, ForwardArguments, arguments_of, attention_inputs_of
from compiled_engine.attention.op import OnAttention
from compiled_engine.config import EngineConfig, GraphMode
from compiled_engine.engine import cache_memory
from compiled_engine.engine.input_batch import InputBatch, InputBuffers, step_of_batch
from compiled_engine.engine.load_model import LoadedModel
from compiled_engine.engine.rank_memory import Memory
from compiled_engine.graphs.compiled_model import BoundRange, CompiledModel
from compiled_engine.graphs.compiler.signature import FORWARD, LOGITS, VARIANTS
from compiled_engine.graphs.cpu_graphs.recorded_forward import RecordedForward, RecordingCounts, recorded
from compiled_engine.parallel.rank_share import local_model

# Number of multiply-adds that justifies another CPU thread: a few tenths of a millisecond of one core. A small step has
# dozens of parallel regions of a few microseconds. Each waits for all threads, and on a busy machine until the system
# schedules them.
LEAST_WORK = 2_500_000


@contextmanager
def threads_for_step(num_tokens: int, num_parameters: int, device: torch.device) -> Iterator[None]:
    """Limit the number of PyTorch's CPU threads within a block, for a step of `num_tokens` tokens; then restore it.

    A small step gets few threads, see LEAST_WORK. Does nothing on a GPU.
    """
    before = torch.get_num_threads() if device.type == "cpu" else 1
    worth = max(1, num_tokens * num_parameters // LEAST_WORK)
    if worth >= before:
        yield
        return
    torch.set_num_threads(worth)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class ForwardOutput:
    """The result of a forward: the hidden states or the logits of all tokens."""

    tensor: torch.Tensor  # hidden states [T, D], or logits [T, V] of the rank's part of the vocabulary
    is_logits: bool
    # tensors that the forward returns for a feature besides its result, [T, ...] each, valid until the next call
    further: tuple[torch.Tensor, ...] = ()
    variant: str = ""  # the forward's variant
    # step tensors that the variant's logits read besides hidden states, [T] each
    logits_inputs: tuple[torch.Tensor, ...] = ()

    def of_tokens(self, tokens: slice | torch.Tensor) -> ForwardOutput:
        """Return the output for some tokens, with the field `further` empty.

        tokens: a slice, or an int64 tensor of indices.
        """
        inputs = () if self.is_logits else tuple(each_T[tokens] for each_T in self.logits_inputs)
        return ForwardOutput(self.tensor[tokens], self.is_logits, variant=self.variant, logits_inputs=inputs)


class Way(NamedTuple):
    """A way to run the model: which variant of the forward, whole or in parts, with all layers or one of each kind."""

    variant: str = ""
    around_attention: bool = False  # in parts, with attention ops passed to on_attention
    distinct: bool = False  # one layer of each kind if the model is compiled, for warm-up and dry runs


class ModelForward:
    """Runs a model, compiled or eager, on batches.

    on_attention: called in place of attention ops by `run(..., around_attention=True)`; None if that is never used.
    layers: the layers of the model that this rank has; None: all.

    Attributes: kv_caches: a tensor per layer, of one block until `allocate`. ends: the callables that run after a
    forward, by name: logits, and those that features call. variants: the names of the forward's variants, the usual
    one, "", first.
    """

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        on_attention: OnAttention | None,
        layers: range | None = None,
    ):
        self._config, self._layers = config, layers
        # Limits the CPU threads during a step, given its number of tokens.
        self.threads = partial(threads_for_step, num_parameters=loaded.num_parameters, device=config.device)
        self.kv_caches = cache_memory.allocate(config, 1, layers)
        self._backend = get_backend(config.attention_backend)
        cases = cases_of(local_model(config), config.cache.block_size, config.device, config.cache.kv_dtype)
        case = planned_together(cases)
        # None: each layer plans its attention, or the backend plans none.
        self._case = case if case is not None and self._backend.work_length(1, 1, case) else None
        model, tensors = loaded.callables, loaded.tensors
        self._received = model.received
        self.variants = ("", *model.variants)
        self.ends = {name: model.bind(name, tensors)[-1].call for name in model.ends}
        # For each Way, functions for ranges of batch sizes. The first one that fits a batch is called. The last one
        # fits every batch, and returns hidden states.
        self._table: dict[Way, tuple[BoundRange, ...]] = {}
        parts = (False,) if on_attention is None else (False, True)
        for way in map(Way._make, product(self.variants, parts, (False, True))):
            passed_to = on_attention if way.around_attention else None
            name = way.variant or FORWARD
            self._table[way] = model.bind(name, tensors, passed_to, distinct=way.distinct)
        if config.graph.mode is GraphMode.RECORDED and isinstance(model, CompiledModel):
            usual = recorded(model, self._table[Way()])
            self._table |= {Way(): usual, Way(distinct=True): usual}

    def work_length(self, num_tokens: int, num_rows: int) -> int:
        """Return the length of AttentionInputs.work_W for batches of up to these sizes; 0 if `plan` does nothing."""
        return 0 if self._case is None else self._backend.work_length(num_tokens, num_rows, self._case)

    def allocate(self, num_blocks: int, memory: Memory | None = None) -> None:
        """Replace the tensors in kv_caches by new zeros of `num_blocks` blocks. memory: see RankMemory.kv_cache."""
        self.kv_caches[:] = cache_memory.allocate(self._config, num_blocks, self._layers, memory)

    def forward(
        self,
        batch: InputBatch,
        buffers: InputBuffers,
        *,
        hidden_wanted: bool = False,
        around_attention: bool = False,
        distinct: bool = False,
    ) -> ForwardOutput:
        """Run the forward of a batch whose inputs are in the buffers, and return its output; see `run`.

        The batch's attention is planned first, except with around_attention: then it must have been planned already.
        """
        step = step_of_batch(batch, buffers)
        inputs = attention_inputs_of(step, self._config.attention_backend)
        if not (around_attention or self._case is None):
            self.plan(inputs)
        return self.run(
            batch.padded_tokens,
            arguments_of(step, inputs, self.kv_caches),
            hidden_wanted=hidden_wanted,
            around_attention=around_attention,
            distinct=distinct,
            variant=batch.variant,
            logits_inputs=buffers.logits_inputs(batch.variant, batch.padded_tokens) if batch.variant else (),
        )

    def run(
        self,
        num_tokens: int,
        arguments: ForwardArguments,
        *,
        hidden_wanted: bool = False,
        around_attention: bool = False,
        distinct: bool = False,
        variant: str = "",
        logits_inputs: tuple[torch.Tensor, ...] = (),
    ) -> ForwardOutput:
        """Run the forward of a batch of `num_tokens` tokens on these arguments.

        hidden_wanted: return hidden states even if the forward could return logits. around_attention, distinct,
        variant: see Way; with `distinct`, the returned values are meaningless. logits_inputs: see ForwardOutput; these
        tensors must also be among the arguments.
        """
        bound = self._bound(num_tokens, Way(variant, around_attention, distinct), hidden_wanted)
        result = bound.call(*arguments)
        tensor, *further = result if isinstance(result, tuple) else (result,)
        return ForwardOutput(tensor, bound.ends_at_logits, tuple(further), variant, logits_inputs)

    def _bound(self, num_tokens: int, way: Way, hidden_wanted: bool = False) -> BoundRange:
        *small, every = self._table[way]
        for bound in small:
            if num_tokens in bound.compile_range and not (hidden_wanted and bound.ends_at_logits):
                return bound
        return every

    def ends_at_logits(self, num_tokens: int, variant: str = "") -> bool:
        """Return whether the forward for this number of tokens returns logits if `hidden_wanted` is False."""
        return self._bound(num_tokens, Way(variant)).ends_at_logits

    def logits_of(self, output: ForwardOutput) -> torch.Tensor:
        if output.is_logits:
            return output.tensor
        own = VARIANTS.get(output.variant, LOGITS)
        logits: torch.Tensor = self.ends[own if own in self.ends else LOGITS](output.tensor, *output.logits_inputs)
        return logits

    def received(self, num_tokens: int, *, hidden_wanted: bool = False) -> torch.Tensor | None:
        """Return the uint8 tensor into which the previous pipeline stage's activations must be written before `run`.

        It is as long as the activations of `num_tokens` tokens. hidden_wanted: see `run`. Returns None if there is no
        previous stage.
        """
        if self._received is None:
            return None
        return self._received[: num_tokens * self._bound(num_tokens, Way(), hidden_wanted).received_row_bytes]

    def planned_inputs(self, batch: InputBatch, buffers: InputBuffers) -> AttentionInputs:
        """Return the batch's attention inputs, after planning its attention, see `plan`."""
        inputs = attention_inputs_of(step_of_batch(batch, buffers), self._config.attention_backend)
        self.plan(inputs)
        return inputs

    def plan(self, inputs: AttentionInputs) -> None:
        """Plan the attention of all layers at once: write the kernels' work list to `inputs.work_W`.

        Does nothing if each layer plans its own attention, or if the attention backend needs no plan.
        """
        if self._case is not None:
            self._backend.plan(inputs, self._case)

    def recording_counts(self) -> list[RecordingCounts]:
        return [each.call.counts for each in self._table.get(Way(), ()) if isinstance(each.call, RecordedForward)]

    def close(self) -> None:
        """Drop this object's references to the weights and the KV cache, so that their memory can be freed."""
        self._table.clear()
        self.ends.clear()
        self.kv_caches.clear()
