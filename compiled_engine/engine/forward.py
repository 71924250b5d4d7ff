"""A rank's model with its slices of the checkpoint, and the compiled or eager forward that runs each batch.

A forward has variants: the usual one, "", and others that features choose for a step, such as one with LoRA adapters.
Each variant can run whole, or in parts between attention ops, which then are not captured in a CUDA graph. A compiled
forward of few tokens ends at logits; another ends at hidden states, and the logits of some tokens follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from compiled_engine.attention.backend import get_backend
from compiled_engine.attention.case import AttentionCase
from compiled_engine.attention.inputs import AttentionInputs, ForwardArguments, arguments_of, attention_inputs_of
from compiled_engine.attention.op import OnAttention
from compiled_engine.config import EngineConfig, ModelConfig
from compiled_engine.engine.eager_forward import eager_forwards, eager_parameters
from compiled_engine.engine.input_batch import InputBatch, InputBuffers, step_of_batch
from compiled_engine.graphs.compiled_model import CompiledModel, Forwards, compile_model
from compiled_engine.graphs.compiler.stage_plan import StageForward
from compiled_engine.graphs.cpu_graphs.recorded_forward import RecordedForward, RecordingCounts, recorded
from compiled_engine.graphs.cuda_graphs.capture import AttentionsOfEagerCode
from compiled_engine.models.checkpoint.build_model import build_model, build_tensors, shards_of
from compiled_engine.models.checkpoint.loader import load_weights
from compiled_engine.models.checkpoint.parameters import materialize
from compiled_engine.parallel.group import Group
from compiled_engine.parallel.rank_share import local_model
from compiled_engine.parallel.shards import add_collectives
from compiled_engine.passes.framework.parameter import KEPT
from compiled_engine.passes.registry import registered_passes
from compiled_engine.process.progress import Progress
from compiled_engine.process.timeline import Timeline

# Number of multiply-adds that justifies another CPU thread: a few tenths of a millisecond of one core. A small step has
# dozens of parallel regions of a few microseconds. Each waits for all threads, and on a busy machine until the system
# schedules them.
LEAST_WORK = 2_500_000


def compile_in_turn(
    config: EngineConfig,
    group: Group,
    model_to_trace: Callable[[ModelConfig], nn.Module],
    progress: Progress,
    timeline: Timeline,
) -> CompiledModel:
    """Compile the model with compile_model, on the first rank before the others.

    The first rank builds a missing cache entry, compiling kernels in parallel; then the others load it. Without a
    cache, all ranks compile at the same time.
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
    """Return the model with its weights on the device, and every parameter and buffer by name, packed ones included.

    compiled: the compiled model of this rank's stage; None if the model runs eagerly. Tensors that the compiled model
    does not take stay on the meta device. shared: another model's tensors to use as parameters, by name. Raises what
    materialize and load_weights raise.
    """
    cache_dir, num_ranks = config.compile.cache_dir, config.parallel.tensor_parallel_size
    model = build_tensors(local_model(config), cache_dir) if compiled else build_model(local_model(config))
    shared = shared or {}
    parameters = compiled.parameters if compiled else eager_parameters(config, model)
    weights = materialize(model, [each for each in parameters if each.name not in shared], config.device)
    for name, tensor in shared.items():
        owner, _, attribute = name.rpartition(".")
        weights.tensors[name] = tensor
        setattr(model.get_submodule(owner), attribute, nn.Parameter(tensor, requires_grad=False))
    whole = model if num_ranks == 1 else build_tensors(config.model, cache_dir)
    load_weights(weights, whole, config.model, progress, group.rank, num_ranks, cache_dir)
    if not compiled:
        add_collectives(model, shards_of(config))
    kept = {parameter.name: weights.tensors[parameter.name] for parameter in parameters if parameter.role == KEPT}
    for graph_pass in registered_passes():
        if kept and graph_pass.name in config.compile.passes:
            graph_pass.keep(kept)
    return model, weights.tensors


@contextmanager
def threads_for_step(num_tokens: int, num_parameters: int, device: torch.device) -> Iterator[None]:
    """Limit the CPU threads to the number that a step of num_tokens tokens justifies; restore the number afterwards."""
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
    """The hidden states or logits of all tokens."""

    tensor: torch.Tensor  # hidden states [T, D], or logits [T, V] of the rank's part of the vocabulary
    is_logits: bool
    # inputs of the layers that a draft head reads, [T, D] each, valid until the next call
    aux_hidden_states: tuple[torch.Tensor, ...] = ()
    variant: str = ""  # the forward's variant
    beside: tuple[torch.Tensor, ...] = ()  # step tensors that the variant's logits read besides hidden states, [T] each

    def of_tokens(self, tokens: slice | torch.Tensor) -> ForwardOutput:
        """Return the output of some tokens, without aux_hidden_states. tokens: a slice, or int64 indices."""
        beside = () if self.is_logits else tuple(each_T[tokens] for each_T in self.beside)
        return ForwardOutput(self.tensor[tokens], self.is_logits, variant=self.variant, beside=beside)


@dataclass(frozen=True)
class _Variant:
    """The ways to run one variant of the forward."""

    whole: Forwards
    parts: Forwards  # in parts around attention ops
    distinct_whole: Forwards  # like `whole`, but with one call per kind of layer; for warm-up and dry runs
    distinct_parts: Forwards

    @classmethod
    def of(cls, forwards: Forwards) -> _Variant:
        return cls(forwards, forwards, forwards, forwards)


def _bound(bind: Callable[..., Forwards], on_attention: OnAttention | None) -> _Variant:
    """Bind a variant's forwards. bind: `CompiledModel.bind` with the parameters given."""
    whole, distinct = bind(), bind(distinct=True)
    if on_attention is None:
        return _Variant(whole, whole, distinct, distinct)
    return _Variant(whole, bind(on_attention=on_attention), distinct, bind(on_attention=on_attention, distinct=True))


def _eager(forwards: Forwards, on_attention: OnAttention | None) -> _Variant:
    parts = forwards if on_attention is None else replace(forwards, hidden=_EagerParts(forwards.hidden, on_attention))
    return _Variant(forwards, parts, forwards, parts)


class ModelForward:
    """Runs the model on a batch: the compiled forward for the batch's number of tokens, or the eager model.

    on_attention: called by `run(..., around_attention=True)` in place of attention ops; None if never used.
    most_tokens: maximum of a batch. records: record batches of decodes on a CPU and replay them. aux_layers: layers
    whose inputs the eager model also returns; a compiled forward is built to return them. A pipeline stage that is not
    the last returns its boundary activations in place of hidden states and of logits.
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
            usual = _Variant.of(recorded(compiled, bind())) if records else _bound(bind, on_attention)
            others = {name: _bound(partial(bind, variant=name), on_attention) for name in compiled.variants}
            self._variants = {"": usual} | others
        else:
            forwards = eager_forwards(model, parameters, aux_layers)
            self._variants = {name: _eager(each, on_attention) for name, each in forwards.items()}
        whole = self._variants[""].whole
        self.logits, self.pooler, self.combine = whole.logits, whole.pooler, whole.combine

    def logits_of(self, output: ForwardOutput) -> torch.Tensor:
        if output.is_logits:
            return output.tensor
        return self._variants[output.variant].whole.logits(output.tensor, *output.beside)

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants of the forward, starting with the usual one, ""."""
        return tuple(self._variants)

    def ends_at_logits(self, num_tokens: int, variant: str = "") -> bool:
        """Return whether the forward for this number of tokens returns logits, unless hidden states are wanted."""
        return self._variants[variant].whole.for_logits(num_tokens) is not None

    def received(self, num_tokens: int, *, hidden_wanted: bool = False) -> torch.Tensor | None:
        """Return the uint8 buffer from which `run` reads the previous stage's activations; None in the first stage."""
        if self._received is None:
            return None
        whole = self._variants[""].whole
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
        variant: str = "",
        beside: tuple[torch.Tensor, ...] = (),
    ) -> ForwardOutput:
        """Run the forward of a batch of num_tokens tokens.

        hidden_wanted: return hidden states, not logits. around_attention: pass attention ops to on_attention. distinct:
        run one layer of each kind if the model is compiled; the values mean nothing. beside: see ForwardOutput; these
        tensors must also be among the arguments.
        """
        chosen = self._variants[variant]
        if distinct:
            forwards = chosen.distinct_parts if around_attention else chosen.distinct_whole
        else:
            forwards = chosen.parts if around_attention else chosen.whole
        small = None if hidden_wanted else forwards.for_logits(num_tokens)
        result = (small or forwards.for_hidden(num_tokens))(*arguments)
        tensor, *aux_hidden_states = result if isinstance(result, tuple) else (result,)
        return ForwardOutput(tensor, small is not None, tuple(aux_hidden_states), variant, beside)

    def recording_counts(self) -> list[RecordingCounts]:
        return [forward.counts for _, forward in self._variants[""].whole.small if isinstance(forward, RecordedForward)]

    def close(self) -> None:
        """Drop the last references to the weights."""
        self._variants = {"": _Variant.of(Forwards(nn.Identity()))}
        self.logits = self.pooler = self.combine = nn.Identity()


@dataclass(frozen=True)
class BatchForward:
    """Runs the model on batches whose inputs are in `buffers`."""

    model: ModelForward
    buffers: InputBuffers
    kv_caches: list[torch.Tensor]  # one tensor per layer
    backend: str  # name of the attention backend
    case: AttentionCase | None  # the layers' attention, if its work is planned once per step; None: each layer plans

    def __call__(
        self,
        batch: InputBatch,
        *,
        hidden_wanted: bool = False,
        around_attention: bool = False,
        distinct: bool = False,
    ) -> ForwardOutput:
        """Run the forward, see ModelForward.run. With around_attention, attention must have been planned."""
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
            variant=batch.variant,
            beside=self.buffers.beside(batch.variant, batch.padded_tokens) if batch.variant else (),
        )

    def planned_inputs(self, batch: InputBatch) -> AttentionInputs:
        """Plan the batch's attention work, and return the inputs of attention."""
        inputs = attention_inputs_of(step_of_batch(batch, self.buffers), self.backend)
        self._plan(inputs)
        return inputs

    def _plan(self, inputs: AttentionInputs) -> None:
        if self.case is not None:
            get_backend(self.backend).plan(inputs, self.case)


class _EagerParts:
    """Runs the eager model with attention ops passed to on_attention."""

    def __init__(self, model: Callable[..., Any], on_attention: OnAttention):
        self._model, self._on_attention = model, on_attention

    def __call__(self, *arguments: Any) -> Any:
        with AttentionsOfEagerCode(self._on_attention):
            return self._model(*arguments)
