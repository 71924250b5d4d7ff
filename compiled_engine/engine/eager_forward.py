"""Forwards of an eager model. Module hooks do what passes do for compiled ones: add adapters, return layers' inputs.

The hook of a linear adds B(Ax) of the token's adapter, with the op that the pass emits. Linears are not merged, so each
has its own adapter slots, under its own name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from compiled_engine.config import EngineConfig
from compiled_engine.graphs.compiled_model import Forwards
from compiled_engine.models.checkpoint.build_model import shards_of
from compiled_engine.models.checkpoint.parameters import parameters_of
from compiled_engine.passes.framework.parameter import Parameter
from compiled_engine.passes.layout.aux_hidden_states import layer_stack
from compiled_engine.passes.linear.adapter_add import adapter_add
from compiled_engine.passes.linear.adapters import ADAPTED, MATRIX_A, MATRIX_B, RANKS, slots_of


def eager_forwards(model: Any, tensors: Mapping[str, torch.Tensor], aux_layers: Sequence[int]) -> dict[str, Forwards]:
    """Return a model's forwards by variant: "", and ADAPTED if there are adapter slots.

    tensors: the model's parameters and the slots, by name. aux_layers: layers whose inputs are returned too.
    """
    pooler = getattr(model, "pooler", None)
    ends: dict[str, Any] = {"logits": model.logits} if pooler is None else {"pooler": pooler, "pools": True}
    if (combine := getattr(model, "combine", None)) is not None:
        ends["combine"] = combine
    forward = _AuxHiddenStates(model, aux_layers) if aux_layers else model
    found = {"": Forwards(forward, **ends)}
    if not any(name.endswith(RANKS) for name in tensors):
        return found
    adapters = _Adapters(model, tensors)
    if pooler is None:
        ends["logits"] = adapters.adapted(model.logits)
    return found | {ADAPTED: Forwards(adapters.adapted(forward), **ends)}


def adapted_parameters(config: EngineConfig, model: nn.Module) -> tuple[Parameter, ...]:
    """Describe the weights that adapters may change, and their slots, like a compiled plan; () without adapters."""
    if config.adapters is None:
        return ()
    shards, found = shards_of(config), list[Parameter]()
    for name, linear in _linears(model):
        weight = Parameter.of(f"{name}.weight", linear.weight, shard=shards.get(f"{name}.weight"))
        found += [weight, *slots_of(weight, linear.in_features, linear.weight.dtype, config.adapters)]
    return tuple(found)


def eager_parameters(config: EngineConfig, model: nn.Module) -> tuple[Parameter, ...]:
    """Describe all tensors that a rank's model needs memory for."""
    return (*parameters_of(model, shards_of(config)), *adapted_parameters(config, model))


class _AuxHiddenStates:
    """Runs the eager model, and returns the inputs of these layers after its hidden states."""

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


class _Adapters:
    """Adds adapters to the linears of an eager model, in calls of functions made by `adapted`.

    tensors: the model's parameters and adapter slots, by name.
    """

    def __init__(self, model: nn.Module, tensors: Mapping[str, torch.Tensor]):
        self._slots_T: torch.Tensor | None = None
        for name, linear in _linears(model):
            slots = [tensors[f"{name}.weight{suffix}"] for suffix in (MATRIX_A, MATRIX_B, RANKS)]
            # Before the all-reduce of a sharded input, which completes both.
            linear.register_forward_hook(partial(self._add, slots), prepend=True)

    def adapted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with an additional last argument, the adapter slot of each token or row."""

        def with_slots(*arguments: Any) -> Any:
            *others, self._slots_T = arguments
            try:
                return function(*others)
            finally:
                self._slots_T = None

        return with_slots

    def _add(
        self, slots: Sequence[torch.Tensor], linear: nn.Module, arguments: tuple[Any, ...], output: torch.Tensor
    ) -> torch.Tensor | None:
        if self._slots_T is None:
            return None
        y_TN, x_TK = output.flatten(0, -2), arguments[0].flatten(0, -2)  # transformers has a batch dimension
        added: torch.Tensor = adapter_add(y_TN, x_TK, *slots, self._slots_T, [y_TN.shape[1]])
        return added.view(output.shape)


def _linears(model: Any) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linears that process tokens, by name; a pooler's head processes pooled values."""
    heads = [model.pooler] if isinstance(getattr(model, "pooler", None), nn.Module) else getattr(model, "heads", [])
    of_heads = {id(module) for head in heads for module in head.modules()}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and id(module) not in of_heads:
            yield name, module
