"""Adds LoRA adapters to an eager model, by module hooks.

The hook of a linear adds B(Ax), where A and B are the matrices of the token's adapter, with the op that the pass
`adapters` emits. An eager model does not merge linears, so each linear has adapter slots under its own name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from compiled_engine.config import EngineConfig
from compiled_engine.graphs.compiler.signature import ADAPTED_LOGITS, FORWARD, LOGITS
from compiled_engine.graphs.compiler.stitch import Forward
from compiled_engine.models.checkpoint.build_model import shards_of
from compiled_engine.models.foreign.latents import LatentAttention
from compiled_engine.passes.framework.parameter import Parameter
from compiled_engine.passes.linear.adapter_add import adapter_add
from compiled_engine.passes.linear.adapters import ADAPTED, MATRIX_A, MATRIX_B, RANKS, slots_of


def adapted_parameters(config: EngineConfig, model: nn.Module) -> tuple[Parameter, ...]:
    """Return the weights that adapters may change, each followed by the tensors with its adapter slots.

    A compiled model has these tensors too.
    """
    assert config.adapters is not None
    shards, found = shards_of(config), list[Parameter]()
    for name, linear in _linears(model):
        weight = Parameter.of(f"{name}.weight", linear.weight, shard=shards.get(f"{name}.weight"))
        found += [weight, *slots_of(weight, linear.in_features, linear.weight.dtype, config.adapters)]
    return tuple(found)


class EagerAdapters:
    """Adds variants of an eager model's forward and logits, in which hooks add the adapters' results to linears.

    Implements EagerFeature. In the model's own forward and logits, the hooks add nothing.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._slots_T: torch.Tensor | None = None  # during a call of a callable with adapters

    def parameters(self, model: nn.Module) -> tuple[Parameter, ...]:
        return adapted_parameters(self._config, model)

    def callables(
        self, model: nn.Module, callables: Mapping[str, Forward], tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, Forward]:
        for name, linear in _linears(model):
            slots = [tensors[f"{name}.weight{suffix}"] for suffix in (MATRIX_A, MATRIX_B, RANKS)]
            # Before the all-reduce of a sharded input, which completes both.
            linear.register_forward_hook(partial(self._add, slots), prepend=True)
        names = {FORWARD: ADAPTED, LOGITS: ADAPTED_LOGITS}
        adapted = {names[name]: self._adapted(call) for name, call in callables.items() if name in names}
        return {**callables, **adapted}

    def _adapted(self, call: Forward) -> Callable[..., Any]:
        """Return `call` with an additional last argument: the adapter slot of each token, or of each row of logits."""

        def with_slots(*arguments: Any) -> Any:
            *others, self._slots_T = arguments
            try:
                return call(*others)
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
    """Yield the name and module of each linear that processes tokens.

    The linears of a pooler's head are left out, since they process pooled vectors. So is `kv_b_proj` of latent
    attention, which reads only the weight of that linear.
    """
    heads = [model.pooler] if isinstance(getattr(model, "pooler", None), nn.Module) else getattr(model, "heads", [])
    others = {id(module) for head in heads for module in head.modules()}
    others |= {id(module.kv_b_proj) for module in model.modules() if isinstance(module, LatentAttention)}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and id(module) not in others:
            yield name, module
