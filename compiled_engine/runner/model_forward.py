"""The model as a rank has it: compiled or eager, with its slices of the checkpoint, and its forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from compiled_engine.attention.backend import get_backend
from compiled_engine.attention.case import AttentionCase
from compiled_engine.attention.inputs import AttentionInputs, ForwardArguments, arguments_of, attention_inputs_of
from compiled_engine.attention.op import OnAttention
from compiled_engine.config import EngineConfig, ModelConfig
from compiled_engine.graphs.compiled_model import CompiledModel, Forwards, compile_model
from compiled_engine.graphs.compiler.stage_plan import StageForward
from compiled_engine.graphs.cpu_graphs.recorded_forward import RecordedForward, RecordingCounts, recorded
from compiled_engine.graphs.cuda_graphs.segments import AttentionsOfEagerCode
from compiled_engine.models.checkpoint.build_model import build_model, build_tensors, shards_of
from compiled_engine.models.checkpoint.loader import load_weights
from compiled_engine.models.checkpoint.parameters import materialize, parameters_of
from compiled_engine.parallel.group import Group
from compiled_engine.parallel.shards import add_collectives
from compiled_engine.passes.framework.parameter import KEPT
from compiled_engine.passes.layout.aux_hidden_states import layer_stack
from compiled_engine.passes.registry import registered_passes
from compiled_engine.process.progress import Progress
from compiled_engine.process.timeline import Timeline
from compiled_engine.runner.input_batch import InputBatch, InputBuffers, step_of_batch

# Multiply-adds that are worth a CPU thread: a few tenths of a millisecond of one core. A small step has dozens of
# parallel regions of a few microseconds; every one of them waits for all threads, and on a busy machine for the
# operating system to run them.
LEAST_WORK = 2_500_000


def compile_in_turn(
    config: EngineConfig,
    group: Group,
    model_to_trace: Callable[[ModelConfig], nn.Module],
    progress: Progress,
    timeline: Timeline,
) -> CompiledModel:
    """See compile_model. The first rank builds a missing cache entry, with its kernels compiled in parallel; then the
    others load it. Without a cache each builds it.
    """
    finds = group.rank > 0 and config.compile.cache_dir is not None
    if finds:
        group.all_reduce_min(1)
    compiled = compile_model(config, model_to_trace, progress, timeline)
    if not finds:
        group.all_reduce_min(1)
    return compiled


def load_model(
    config: EngineConfig,
    compiled: CompiledModel | None,
    group: Group,
    progress: Progress,
    shared: Mapping[str, torch.Tensor] | None = None,
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model with its weights on the device, and every parameter and buffer by name, packed ones included.

    compiled: of this rank's stage; None: the model is to run eagerly. What the compiled model does not take stays on
    the meta device. shared: tensors of another model that are parameters of this one too, by name. Raises what
    materialize and load_weights raise.
    """
    cache_dir, num_ranks = config.compile.cache_dir, config.parallel.tensor_parallel_size
    model = build_tensors(config.local_model, cache_dir) if compiled else build_model(config.local_model)
    shards = {} if compiled else shards_of(config)
    shared = shared or {}
    parameters = compiled.parameters if compiled else parameters_of(model, shards)
    weights = materialize(model, [each for each in parameters if each.name not in shared], config.device)
    for name, tensor in shared.items():
        owner, _, attribute = name.rpartition(".")
        weights.tensors[name] = tensor
        setattr(model.get_submodule(owner), attribute, nn.Parameter(tensor, requires_grad=False))
    whole = model if num_ranks == 1 else build_tensors(config.model, cache_dir)
    load_weights(weights, whole, config.model, progress, group.rank, num_ranks, cache_dir)
    if not compiled:
        add_collectives(model, shards)
    kept = {parameter.name: weights.tensors[parameter.name] for parameter in parameters if parameter.role == KEPT}
    for graph_pass in registered_passes():
        if kept and graph_pass.name in config.compile.passes:
            graph_pass.keep(kept)
    return model, weights.tensors


@contextmanager
def threads_for_step(num_tokens: int, num_parameters: int, device: torch.device) -> Iterator[None]:
    """Run a step of num_tokens tokens with as many threads as it is worth; the caller's number is put back."""
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
    """The hidden states or the logits of every token, [T, D] or [T, V], V columns of a rank. aux_hidden_states: the
    inputs of the layers that a head reads, [T, D] each, valid until the next call. slots_T: int32 [T], the slot of each
    token's adapter, -1 without one; None for a step without adapters."""

    tensor: torch.Tensor
    is_logits: bool
    aux_hidden_states: tuple[torch.Tensor, ...] = ()
    slots_T: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        result: torch.Tensor | tuple[torch.Tensor, ...],
        *,
        is_logits: bool,
        slots_T: torch.Tensor | None = None,
    ) -> ForwardOutput:
        """Wrap what a forward returns."""
        tensor, *aux_hidden_states = result if isinstance(result, tuple) else (result,)
        return cls(tensor, is_logits, tuple(aux_hidden_states), slots_T)

    def of_tokens(self, tokens: slice | torch.Tensor) -> ForwardOutput:
        """Return the part of some tokens, without aux_hidden_states. tokens: a slice, or numbers, int64."""
        slots_T = None if self.slots_T is None or self.is_logits else self.slots_T[tokens]
        return ForwardOutput(self.tensor[tokens], self.is_logits, slots_T=slots_T)


@dataclass(frozen=True)
class _Variant:
    """The forwards of a model, whole or in parts around attention, and forwards that call each kind of piece once."""

    whole: Forwards
    parts: Forwards
    distinct_whole: Forwards
    distinct_parts: Forwards

    @classmethod
    def of(cls, forwards: Forwards) -> _Variant:
        return cls(forwards, forwards, forwards, forwards)


def _bound(bind: Callable[..., Forwards], on_attention: OnAttention | None) -> _Variant:
    """bind: `CompiledModel.bind` of these parameters."""
    whole, distinct = bind(), bind(distinct=True)
    if on_attention is None:
        return _Variant(whole, whole, distinct, distinct)
    return _Variant(whole, bind(on_attention=on_attention), distinct, bind(on_attention=on_attention, distinct=True))


class ModelForward:
    """Calls the forward that is compiled for the number of tokens, or the eager model.

    on_attention: what `run(..., around_attention=True)` calls in place of the attention ops; None if never called.
    most_tokens: of a batch. records: on a CPU batches of decodes are recorded and replayed. aux_layers: the layers
    whose inputs are returned too; compiled forwards return them already. A stage with others behind it returns what it
    sends on for hidden states and logits alike.
    """

    def __init__(
        self,
        model: nn.Module,
        compiled: CompiledModel | None,
        parameters: Mapping[str, torch.Tensor],
        on_attention: OnAttention | None,
        most_tokens: int = 0,
        records: bool = False,
        aux_layers: Sequence[int] = (),
    ):
        self._received: torch.Tensor | None = None
        if compiled:
            if row_bytes := compiled.received_row_bytes:
                device = next(iter(parameters.values())).device
                self._received = torch.zeros(most_tokens * row_bytes, dtype=torch.uint8, device=device)
            bind = partial(compiled.bind, parameters, received=self._received)
            self._variant = _Variant.of(recorded(compiled, bind())) if records else _bound(bind, on_attention)
            self._adapted = _bound(partial(bind, adapted=True), on_attention) if compiled.has_adapters else None
        else:
            pooler = getattr(model, "pooler", None)
            ends: dict[str, Any] = {"logits": model.logits} if pooler is None else {"pooler": pooler, "pools": True}
            if (combine := getattr(model, "combine", None)) is not None:
                ends["combine"] = combine
            called = _EagerAuxHiddenStates(model, aux_layers) if aux_layers else model
            whole = Forwards(called, **ends)
            parts = whole if on_attention is None else Forwards(_EagerParts(called, on_attention))
            self._variant, self._adapted = _Variant(whole, parts, whole, parts), None
        whole = self._variant.whole
        self.logits, self.pooler, self.combine = whole.logits, whole.pooler, whole.combine
        self._adapted_logits = whole.adapted_logits

    def logits_of(self, output: ForwardOutput) -> torch.Tensor:
        """Return the logits of each of the output's tokens."""
        if output.is_logits:
            return output.tensor
        if output.slots_T is None:
            return self.logits(output.tensor)
        return self._adapted_logits(output.tensor, output.slots_T)

    @property
    def has_adapters(self) -> bool:
        """Return whether there is a forward with the requests' adapters."""
        return self._adapted is not None

    def ends_at_logits(self, num_tokens: int, *, adapted: bool = False) -> bool:
        """Return whether the forward for this many tokens returns logits by default."""
        return self._of(adapted).whole.for_logits(num_tokens) is not None

    def _of(self, adapted: bool) -> _Variant:
        if not adapted:
            return self._variant
        assert self._adapted is not None
        return self._adapted

    def received(self, num_tokens: int, *, hidden_wanted: bool = False) -> torch.Tensor | None:
        """Return the buffer in which `run` finds the previous stage's values, uint8; None in the first stage."""
        if self._received is None:
            return None
        whole = self._variant.whole
        small = None if hidden_wanted else whole.for_logits(num_tokens)
        forward = whole.hidden if small is None else small
        assert isinstance(forward, StageForward)
        return self._received[: num_tokens * forward.received_row_bytes]

    def run(
        self,
        num_tokens: int,
        arguments: ForwardArguments,
        *,
        hidden_wanted: bool = False,
        around_attention: bool = False,
        distinct: bool = False,
        adapted: bool = False,
    ) -> ForwardOutput:
        """The forward of a batch of num_tokens tokens. hidden_wanted: return hidden states, not logits. distinct: one
        call of each kind where the model is compiled, see `distinct_calls`; its values mean nothing. adapted: with the
        requests' adapters; the arguments end with their step tensors then.
        """
        variant = self._of(adapted)
        if distinct:
            forwards = variant.distinct_parts if around_attention else variant.distinct_whole
        else:
            forwards = variant.parts if around_attention else variant.whole
        small = None if hidden_wanted else forwards.for_logits(num_tokens)
        slots_T = arguments[-1] if adapted else None
        if small is not None:
            return ForwardOutput.of(small(*arguments), is_logits=True, slots_T=slots_T)
        return ForwardOutput.of(forwards.for_hidden(num_tokens)(*arguments), is_logits=False, slots_T=slots_T)

    def recording_counts(self) -> list[RecordingCounts]:
        """Return the counts of each forward whose calls are recorded."""
        return [forward.counts for _, forward in self._variant.whole.small if isinstance(forward, RecordedForward)]

    def close(self) -> None:
        """Drop the last references to the weights."""
        self._variant, self._adapted = _Variant.of(Forwards(nn.Identity())), None
        self.logits = self.pooler = self.combine = self._adapted_logits = nn.Identity()


class _EagerAuxHiddenStates:
    """The eager model, which returns the inputs of these layers behind its hidden states."""

    def __init__(self, model: nn.Module, layers: Sequence[int]):
        self._model = model
        path = layer_stack(name for name, _ in model.named_parameters())
        self._inputs: list[torch.Tensor | None] = [None] * len(layers)
        for index, layer in enumerate(layers):
            model.get_submodule(f"{path}.{layer}").register_forward_pre_hook(partial(self._keep, index))

    def _keep(self, index: int, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._inputs[index] = arguments[0]

    def __call__(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
        hidden_TD = self._model(*arguments)
        inputs, self._inputs = self._inputs, [None] * len(self._inputs)
        return hidden_TD, *(tensor.reshape(hidden_TD.shape) for tensor in inputs if tensor is not None)


@dataclass(frozen=True)
class BatchForward:
    """The model on batches that were prepared in `buffers`.

    kv_caches: one tensor a layer. backend: of attention. case: the case for which attention's work is planned; None if
    each layer plans its own.
    """

    model: ModelForward
    buffers: InputBuffers
    kv_caches: list[torch.Tensor]
    backend: str
    case: AttentionCase | None

    def __call__(
        self,
        batch: InputBatch,
        *,
        hidden_wanted: bool = False,
        around_attention: bool = False,
        distinct: bool = False,
    ) -> ForwardOutput:
        """See ModelForward.run. around_attention: which is planned already."""
        step = step_of_batch(batch, self.buffers)
        inputs = attention_inputs_of(step, self.backend)
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

    def planned_inputs(self, batch: InputBatch) -> AttentionInputs:
        """Plan attention's work for the batch; return its inputs."""
        inputs = attention_inputs_of(step_of_batch(batch, self.buffers), self.backend)
        self._plan(inputs)
        return inputs

    def _plan(self, inputs: AttentionInputs) -> None:
        if self.case is not None:
            get_backend(self.backend).plan(inputs, self.case)


class _EagerParts:
    """The eager model with its attention ops passed on."""

    def __init__(self, model: Callable[..., Any], on_attention: OnAttention):
        self._model, self._on_attention = model, on_attention

    def __call__(self, *arguments: Any) -> Any:
        with AttentionsOfEagerCode(self._on_attention):
            return self._model(*arguments)
