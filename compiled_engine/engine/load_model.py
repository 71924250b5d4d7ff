"""Loads a rank's model: compiles it unless it runs eagerly, and reads the rank's slices of the checkpoint.

A compiled model and an eager one have the same callables under the same names (graphs/compiler/signature.py). What
features need in the model is added by passes to a compiled model, and by the features themselves to an eager one
(`EagerFeature`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from compiled_engine.attention.op import OnAttention
from compiled_engine.config import EngineConfig, ModelConfig
from compiled_engine.engine.rank_memory import Memory
from compiled_engine.graphs.compiled_model import BoundRange, CompiledModel, compile_model
from compiled_engine.graphs.compiler.signature import FORWARD, VARIANTS, callables_of
from compiled_engine.graphs.compiler.stitch import Forward
from compiled_engine.graphs.cuda_graphs.capture import AttentionsOfEagerCode
from compiled_engine.models.checkpoint.build_model import build_model, build_tensors, shards_of
from compiled_engine.models.checkpoint.loader import CheckedWeights, check_weights, load_weights
from compiled_engine.models.checkpoint.parameters import Weights, materialize, parameters_of
from compiled_engine.parallel.group import Group
from compiled_engine.parallel.rank_share import local_model
from compiled_engine.parallel.shards import add_collectives
from compiled_engine.passes.framework.graph_pass import CompileRange
from compiled_engine.passes.framework.parameter import KEPT, Parameter
from compiled_engine.passes.registry import registered_passes
from compiled_engine.process.progress import Progress
from compiled_engine.process.timeline import Timeline

EVERY_BATCH = CompileRange(1, 1 << 31)


class EagerFeature(Protocol):
    """The changes that a feature makes to an eager model by module hooks. In a compiled model, passes make them."""

    def parameters(self, model: nn.Module) -> tuple[Parameter, ...]:
        """Return descriptions of the tensors to allocate for the feature. Tensors of the model may be among them."""
        ...

    def callables(
        self, model: nn.Module, callables: Mapping[str, Forward], tensors: Mapping[str, torch.Tensor]
    ) -> Mapping[str, Forward]:
        """Return the model's callables, by name, with the feature's changes and additions.

        tensors: all parameters by name, including those that `parameters` describes.
        """
        ...


@dataclass(frozen=True)
class EagerModel:
    """The callables of a model that is not compiled. Has the interface of CompiledModel that ModelForward uses."""

    callables: Mapping[str, Forward]
    received: ClassVar[None] = None  # the model is not divided into parts

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(name for name in VARIANTS if name in self.callables)

    @property
    def ends(self) -> tuple[str, ...]:
        """The names of the callables that are neither the forward nor a variant of it, such as the logits."""
        return tuple(name for name in self.callables if name not in (FORWARD, *VARIANTS))

    def bind(
        self,
        name: str,
        parameters: Mapping[str, torch.Tensor],
        on_attention: OnAttention | None = None,
        *,
        distinct: bool = False,
    ) -> tuple[BoundRange, ...]:
        """Return the callable `name` as a single BoundRange, which serves batches of every size.

        on_attention: called in place of attention ops. parameters, distinct: ignored, since the callable has its
        parameters and always runs all layers.
        """
        call = self.callables[name]
        return (BoundRange(EVERY_BATCH, call if on_attention is None else _in_parts(call, on_attention)),)


def _in_parts(call: Forward, on_attention: OnAttention) -> Forward:
    def in_parts(*arguments: Any) -> Any:
        with AttentionsOfEagerCode(on_attention):
            return call(*arguments)

    return in_parts


@dataclass(frozen=True)
class RankWeights:
    """A rank's parameters, and what is needed to fill them again from a checkpoint's tensors."""

    stored: Weights
    whole: nn.Module  # the undivided model, which gives names and shapes
    config: ModelConfig  # the configuration of the undivided model
    rank: int
    num_ranks: int
    cache_dir: Path | None

    def check(self, tensors: dict[str, torch.Tensor], source: Path) -> CheckedWeights:
        """Check that a checkpoint's tensors fit this rank's parameters, and return the result of `check_weights`.

        tensors: tensors by checkpoint name. source: the path from which the tensors come, for errors. Raises what
        `check_weights` raises.
        """
        config = replace(self.config, path=source)
        return check_weights(tensors, self.stored, self.whole, config, self.rank, self.num_ranks, self.cache_dir)


@dataclass(frozen=True)
class LoadedModel:
    """A rank's model with its weights on the device."""

    module: nn.Module
    callables: CompiledModel | EagerModel
    weights: RankWeights

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every parameter and buffer by name, packed ones included."""
        return self.weights.stored.tensors

    @property
    def num_parameters(self) -> int:
        """The number of parameters on the device."""
        return sum(each.numel() for each in self.module.parameters() if not each.is_meta)


def compile_in_turn(
    config: EngineConfig,
    group: Group,
    model_to_trace: Callable[[ModelConfig], nn.Module],
    progress: Progress,
    timeline: Timeline,
) -> CompiledModel | None:
    """Return the compiled model, see `compile_model`; None if the model runs eagerly.

    With a compile cache, the first rank compiles before the others, which then load its cache entry. Without a cache,
    all ranks compile at the same time. All ranks must call this function.
    """
    if not config.compile.enabled:
        return None
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
    features: Sequence[EagerFeature] = (),
    memory: Memory | None = None,
) -> LoadedModel:
    """Load the weights of a rank's model onto the device, and return the model.

    compiled: the compiled model of this rank's stage; parameters that it does not read stay on the meta device. None:
    the model runs eagerly. shared: tensors of another model to use as parameters, by name. features: the changes that
    features make to an eager model. memory: see RankMemory.weights. Raises what materialize and load_weights raise.
    """
    cache_dir, num_ranks = config.compile.cache_dir, config.parallel.tensor_parallel_size
    model = build_tensors(local_model(config), cache_dir) if compiled else build_model(local_model(config))
    shared = shared or {}
    parameters = compiled.parameters if compiled else _eager_parameters(config, model, features)
    allocate = None if memory is None else memory.allocate
    weights = materialize(model, [each for each in parameters if each.name not in shared], config.device, allocate)
    own = {id(tensor): nn.Parameter(tensor, requires_grad=False) for tensor in shared.values()}  # tied ones once
    for name, tensor in shared.items():
        owner, _, attribute = name.rpartition(".")
        weights.tensors[name] = tensor
        setattr(model.get_submodule(owner), attribute, own[id(tensor)])
    whole = model if num_ranks == 1 else build_tensors(config.model, cache_dir)
    load_weights(weights, whole, config.model, progress, group.rank, num_ranks, cache_dir)
    kept = {parameter.name: weights.tensors[parameter.name] for parameter in parameters if parameter.role == KEPT}
    for graph_pass in registered_passes():
        if kept and graph_pass.name in config.compile.passes:
            graph_pass.keep(kept)
    of_rank = RankWeights(weights, whole, config.model, group.rank, num_ranks, cache_dir)
    return LoadedModel(model, compiled or _eager_model(config, model, weights.tensors, features), of_rank)


def _eager_parameters(
    config: EngineConfig, model: nn.Module, features: Sequence[EagerFeature]
) -> tuple[Parameter, ...]:
    of_features = (parameter for feature in features for parameter in feature.parameters(model))
    return (*parameters_of(model, shards_of(config)), *of_features)


def _eager_model(
    config: EngineConfig, model: nn.Module, tensors: Mapping[str, torch.Tensor], features: Sequence[EagerFeature]
) -> EagerModel:
    add_collectives(model, shards_of(config))
    added = {*VARIANTS, *VARIANTS.values()}  # by features
    methods = {name: getattr(model, name) for name in callables_of(config) if name not in (FORWARD, *added)}
    callables: Mapping[str, Forward] = {FORWARD: model, **methods}
    for feature in features:
        callables = feature.callables(model, callables, tensors)
    return EagerModel(callables)
