"""Replaces the recurrence functions that transformers' modules call by functions of the engine.

transformers' model files call each recurrence through a function: `causal_conv1d_fn` for short convolutions,
`torch_chunk_gated_delta_rule` for gated delta nets, `chunk_kimi_delta_attention` for Kimi delta attention,
`mamba2_chunk_scan` for Mamba 2. The class of a module that calls one of them is replaced by a subclass. The subclass's
forward is the same code, in which these names refer to the engine's functions.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import nn

from compiled_engine.models.foreign.interfaces import Step
from compiled_engine.recurrence.matrix_states import Drafted
from compiled_engine.recurrence.op import conv_state_or_value, delta_rule_or_value, state_space_or_value
from compiled_engine.recurrence.states import CONV_STATE, MATRIX_DRAFTS, MATRIX_LENGTHS, MATRIX_STATE

# Names of activations: transformers' to the op's.
ACTIVATIONS = {None: "", "silu": "silu", "swish": "silu"}


class Functions(Protocol):
    """The functions that modules call in place of transformers' functions.

    module: the module whose forward is running.
    """

    module: Any

    def convolve(
        self,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """Apply a causal convolution over T tokens to D channels. hidden_states and result: [1, D, T]."""
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
        """Apply the gated delta rule to T tokens. Returns (result, None).

        query, key: [1, T, G, k], for G heads of k elements. value and result: [1, T, H, v], for H heads of v elements.
        beta: [1, T, H]. g: decays [1, T, H], or [1, T, H, k] with a decay for each element of a key.
        """
        ...

    def scan(
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int,
        D: torch.Tensor,
        dt_bias: torch.Tensor,
        dt_softplus: bool,
        dt_limit: tuple[float, float],
        **others: Any,
    ) -> torch.Tensor:
        """Apply the state space scan of Mamba 2 to T tokens.

        hidden_states and result: [1, T, H, v], for H heads of v elements. dt: [1, T, H]. B, C: [1, T, G, k], for G
        groups of heads. A, D, dt_bias: [H].
        """
        ...


# Name of a function in transformers' files -> the method of Functions that replaces it.
_NAMES = {
    "causal_conv1d_fn": "convolve",
    "torch_chunk_gated_delta_rule": "apply_rule",
    "chunk_kimi_delta_attention": "apply_rule",
    "mamba2_chunk_scan": "scan",
}


class StepFunctions:
    """Implements Functions for a step of the engine: calls the engine's ops on the modules' states."""

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
        state_SDN = getattr(self.module, CONV_STATE)
        out_TD = conv_state_or_value(x_TD, weight, bias, ACTIVATIONS[activation], state_SDN, self._step.sequences())
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
        out_THv = delta_rule_or_value(
            q_TGk, k_TGk, v_THv, g_TH, beta_TH, use_qk_l2norm_in_kernel, *self._matrix_state(), self._step.sequences()
        )
        return out_THv.unsqueeze(0), None

    def scan(
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int,
        D: torch.Tensor,
        dt_bias: torch.Tensor,
        dt_softplus: bool,
        dt_limit: tuple[float, float],
        **others: Any,
    ) -> torch.Tensor:
        x_THv, dt_TH, B_TGk, C_TGk = (x.squeeze(0) for x in (hidden_states, dt, B, C))
        least, most = dt_limit
        limits = float(least), None if math.isinf(most) else float(most)
        operands = x_THv, dt_TH, A, B_TGk, C_TGk, D, dt_bias, *limits
        return state_space_or_value(*operands, *self._matrix_state(), self._step.sequences()).unsqueeze(0)

    def _matrix_state(self) -> tuple[torch.Tensor, Drafted | None]:
        drafted = None
        if hasattr(self.module, MATRIX_DRAFTS):
            drafted = Drafted(getattr(self.module, MATRIX_DRAFTS), getattr(self.module, MATRIX_LENGTHS))
        return getattr(self.module, MATRIX_STATE), drafted


def _class_with(functions: Functions, theirs: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `theirs` whose forward calls `functions` in place of transformers' recurrence functions."""
    code = inspect.unwrap(theirs.forward)
    assert isinstance(code, FunctionType)
    # Without __name__ Dynamo looks globals up in this dictionary instead of in the module of that name.
    scope = {name: value for name, value in code.__globals__.items() if name != "__name__"}
    scope |= {name: getattr(functions, method) for name, method in _NAMES.items()}
    own = FunctionType(code.__code__, scope, code.__name__, code.__defaults__, code.__closure__)
    own.__kwdefaults__ = code.__kwdefaults__

    def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        functions.module = self
        return own(self, *arguments, **keywords)

    # transformers treats a class whose __module__ is not its own as custom code.
    return type(theirs.__name__, (theirs,), {"__module__": theirs.__module__, "forward": forward})


def recurrent_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) for each module of the model that calls one of transformers' recurrence functions."""
    for path, module in model.named_modules():
        if _is_recurrent(type(module)):
            yield path, module


def has_recurrent_family(model: nn.Module) -> bool:
    """Return whether the file of the model's class defines recurrent modules, even if the model contains none."""
    classes = [each for each in vars(sys.modules[type(model).__module__]).values() if isinstance(each, type)]
    return any(issubclass(each, nn.Module) and _is_recurrent(each) for each in classes)


def _is_recurrent(module_class: type[nn.Module]) -> bool:
    forward = inspect.unwrap(module_class.forward)
    return isinstance(forward, FunctionType) and not _NAMES.keys().isdisjoint(forward.__code__.co_names)


def use_functions(model: nn.Module, functions: Functions) -> dict[nn.Module, type[nn.Module]]:
    """Change the classes of the model's recurrent modules, so that the modules call `functions`.

    Returns the previous class of each of these modules.
    """
    before = {module: type(module) for _, module in recurrent_modules(model)}
    mixed = {theirs: _class_with(functions, theirs) for theirs in dict.fromkeys(before.values())}
    for module, theirs in before.items():
        module.__class__ = mixed[theirs]
    return before


@contextmanager
def functions_used(model: nn.Module, functions: Functions) -> Iterator[None]:
    """Make the model's recurrent modules call `functions` within a `with` block; restore their classes afterwards."""
    before = use_functions(model, functions)
    try:
        yield
    finally:
        for module, theirs in before.items():
            module.__class__ = theirs
