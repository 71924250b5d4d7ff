"""Recurrences of transformers' models: the functions that their modules call, and the engine's functions in the place.

transformers has each recurrence behind a function of the model's file: `causal_conv1d_fn` for short convolutions,
`torch_chunk_gated_delta_rule` for gated delta nets. A module that calls one of them gets a class whose forward is the
same code with other functions under these names.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import nn

from compiled_engine.models.foreign.interfaces import Step
from compiled_engine.recurrence.op import conv_state_or_value, delta_rule_or_value

# Names of the states, which are buffers of the modules.
CONV_STATE, RULE_STATE = "conv_state", "rule_state"
# The op's names of activations by transformers' names.
ACTIVATIONS = {None: "", "silu": "silu", "swish": "silu"}


class Functions(Protocol):
    """The functions that modules call instead of transformers'; `module` is the one whose forward runs."""

    module: Any

    def convolve(
        self,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """[1, D, T] in and out."""
        ...

    def apply_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Queries, keys [1, T, G, k], values and result [1, T, H, v], g and beta [1, T, H]."""
        ...


# Methods of Functions by the names that transformers' files have for them.
_NAMES = {"causal_conv1d_fn": "convolve", "torch_chunk_gated_delta_rule": "apply_rule"}


class StepFunctions:
    """Implements Functions for a step: the ops, on the states that the modules have."""

    def __init__(self, step: Step) -> None:
        self.module: Any = None
        self._step = step

    def convolve(
        self,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **others: Any,
    ) -> torch.Tensor:
        x_TD = hidden_states.squeeze(0).transpose(0, 1)
        state_SDL = getattr(self.module, CONV_STATE)
        out_TD = conv_state_or_value(x_TD, weight, bias, ACTIVATIONS[activation], state_SDL, self._step.sequences())
        return out_TD.transpose(0, 1).unsqueeze(0)

    def apply_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        q_TGk, k_TGk, v_THv, g_TH, beta_TH = (x.squeeze(0) for x in (query, key, value, g, beta))
        state_SHkv, sequences = getattr(self.module, RULE_STATE), self._step.sequences()
        out_THv = delta_rule_or_value(
            q_TGk, k_TGk, v_THv, g_TH, beta_TH, use_qk_l2norm_in_kernel, state_SHkv, sequences
        )
        return out_THv.unsqueeze(0), None


def _class_with(functions: Functions, theirs: type[nn.Module]) -> type[nn.Module]:
    """The class of a module with these functions in its forward."""
    code = inspect.unwrap(theirs.forward)
    assert isinstance(code, FunctionType)
    # Without the name of a module Dynamo takes the functions from this dictionary, not from that module.
    scope = {name: value for name, value in code.__globals__.items() if name != "__name__"}
    scope |= {name: getattr(functions, method) for name, method in _NAMES.items()}
    own = FunctionType(code.__code__, scope, code.__name__, code.__defaults__, code.__closure__)
    own.__kwdefaults__ = code.__kwdefaults__

    def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        functions.module = self
        return own(self, *arguments, **keywords)

    # transformers takes classes of modules that are not its own for custom code.
    return type(theirs.__name__, (theirs,), {"__module__": theirs.__module__, "forward": forward})


def recurrent_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of each that calls one of the functions."""
    for path, module in model.named_modules():
        forward = inspect.unwrap(type(module).forward)
        if isinstance(forward, FunctionType) and not _NAMES.keys().isdisjoint(forward.__code__.co_names):
            yield path, module


def use_functions(model: nn.Module, functions: Functions) -> dict[nn.Module, type[nn.Module]]:
    """Have modules call these functions. Returns the classes that they had before."""
    before = {module: type(module) for _, module in recurrent_modules(model)}
    mixed = {theirs: _class_with(functions, theirs) for theirs in dict.fromkeys(before.values())}
    for module, theirs in before.items():
        module.__class__ = mixed[theirs]
    return before


@contextmanager
def functions_used(model: nn.Module, functions: Functions) -> Iterator[None]:
    """Let modules call these functions while the block runs."""
    before = use_functions(model, functions)
    try:
        yield
    finally:
        for module, theirs in before.items():
            module.__class__ = theirs
