"""Makes an eager model also return the inputs of the layers that a draft head reads, by PyTorch module hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from compiled_engine.graphs.compiler.signature import FORWARD
from compiled_engine.graphs.compiler.stitch import Forward
from compiled_engine.passes.framework.parameter import Parameter
from compiled_engine.passes.layout.layer_inputs import layer_stack


class EagerAuxHiddenStates:
    """Makes the forward also return the inputs of `layers`. Implements EagerFeature.

    In the forward's result, these inputs follow the hidden states, [T, D] each.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = layers
        self._inputs: list[torch.Tensor | None] = [None] * len(layers)

    def parameters(self, model: nn.Module) -> tuple[Parameter, ...]:
        return ()

    def callables(
        self, model: nn.Module, callables: Mapping[str, Forward], tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, Forward]:
        path = layer_stack(name for name, _ in model.named_parameters())
        for index, layer in enumerate(self._layers):
            model.get_submodule(f"{path}.{layer}").register_forward_pre_hook(partial(self._keep, index))
        return {**callables, FORWARD: partial(self._run, callables[FORWARD])}

    def _keep(self, index: int, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._inputs[index] = arguments[0]

    def _run(self, forward: Forward, *arguments: Any) -> tuple[torch.Tensor, ...]:
        hidden_TD = forward(*arguments)
        inputs, self._inputs = self._inputs, [None] * len(self._inputs)
        return hidden_TD, *(tensor.reshape(hidden_TD.shape) for tensor in inputs if tensor is not None)
