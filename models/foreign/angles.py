"""Rotary embeddings of transformers whose angles depend on a request's length, computed for each token of a batch.

transformers changes the frequencies of a rotary module between forwards, by the longest sequence of a batch. Here each
token has its own frequencies, from which transformers' forward computes the angles.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from compiled_engine.config import LengthAngles
from compiled_engine.models.foreign.interfaces import Step
from compiled_engine.models.foreign.observation import UnsupportedModelError
from compiled_engine.models.textbook.rope import dynamic_frequencies

LONGROPE, DYNAMIC = "longrope", "dynamic"


def length_angles(config: PreTrainedConfig) -> LengthAngles | None:
    """Return how a model's rotary angles depend on a request's length; None if they do not.

    Raises UnsupportedModelError if the angles depend on the length in only some layers.
    """
    rope: Any = getattr(config, "rope_parameters", None) or {}
    for each in rope.values():
        if isinstance(each, dict) and each.get("rope_type") in (LONGROPE, DYNAMIC):
            raise _unsupported(each["rope_type"], "in some layers")
    if rope.get("rope_type") == LONGROPE:
        return LengthAngles(rope["original_max_position_embeddings"], recomputes=True)
    if rope.get("rope_type") == DYNAMIC:
        return LengthAngles(config.max_position_embeddings, recomputes=False)
    return None


def longest_text(config: PreTrainedConfig) -> int:
    """Return the longest text, in tokens, that a model supports whose rotary angles depend on a request's length."""
    longest, rope = config.max_position_embeddings, config.rope_parameters
    return int(longest * rope["factor"]) if rope["rope_type"] == DYNAMIC else longest


def config_with_factors(kind: str, values: Mapping[str, Any]) -> PreTrainedConfig:
    """Return transformers' configuration of the model type `kind` with these values. Raises the errors of AutoConfig.

    Phi-3's configuration checks the number of LongRoPE factors against hidden_size / num_attention_heads. For a rank
    that has only some of the heads, this is not the size of a head; therefore the factors are set after the check.
    """
    section = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    rope = values.get(section) or {}
    factors = {name: rope[name] for name in ("short_factor", "long_factor") if isinstance(rope.get(name), list)}
    width, num_heads = values.get("hidden_size"), values.get("num_attention_heads")
    checked = width // num_heads if isinstance(width, int) and isinstance(num_heads, int) and num_heads else None
    if not factors or checked in (None, values.get("head_dim", checked)):
        return AutoConfig.for_model(kind, **values)
    partial = values.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))
    count = int(checked * partial) // 2
    changed = {**rope, **{name: [1.0] * count for name in factors}}
    config: Any = AutoConfig.for_model(kind, **{**values, section: changed})
    config.rope_parameters |= factors
    return config


class _Parts:
    """Takes the place of a rotary module in transformers' forward: has the attributes that the forward reads."""

    def __init__(self, inv_freq: torch.Tensor, attention_scaling: float) -> None:
        self.inv_freq, self.attention_scaling = inv_freq, attention_scaling


class RotaryByLength:
    """Mixin for a rotary module of transformers: each token's frequencies depend on the length of the token's request.

    Requests of up to LengthAngles.border tokens have the frequencies `inv_freq`. If the step has no `angle_lengths_T`,
    no request is longer.
    """

    # transformers' forward, without its changes of frequencies
    compute: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    angles: LengthAngles
    step: Step | None  # None until the model is adapted
    inv_freq: torch.Tensor  # the frequencies of requests up to the border, the length at which they change
    attention_scaling: float
    config: Any

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of the angles, as transformers' forward does."""
        lengths_T = None if self.step is None else self.step.angle_lengths_T
        frequencies = self.inv_freq if lengths_T is None else self.frequencies(lengths_T)
        return self.compute(_Parts(frequencies, self.attention_scaling), x, position_ids)

    def frequencies(self, lengths_T: torch.Tensor) -> torch.Tensor:
        """Return the p frequencies of each of T tokens, [T, p].

        lengths_T: the request length that each token's frequencies assume, see attention.inputs.ANGLE_LENGTHS.
        """
        raise NotImplementedError


class LongRope(RotaryByLength):
    long_inv_freq: torch.Tensor  # the frequencies of requests beyond the border

    def frequencies(self, lengths_T: torch.Tensor) -> torch.Tensor:
        return torch.where(lengths_T[:, None] > self.angles.border, self.long_inv_freq, self.inv_freq)


class DynamicRope(RotaryByLength):
    exponents: torch.Tensor  # see dynamic_frequencies

    def frequencies(self, lengths_T: torch.Tensor) -> torch.Tensor:
        rope = self.config.rope_parameters
        return dynamic_frequencies(lengths_T, self.exponents, rope["rope_theta"], rope["factor"], self.angles.border)


def adapt_rotary_modules(model: nn.Module, angles: LengthAngles) -> None:
    """Change the model's rotary modules in place, so that they compute frequencies for each token.

    Raises UnsupportedModelError if a module's forward cannot take frequencies for each token, or if there is no such
    module.
    """
    kind, ours = (LONGROPE, LongRope) if angles.recomputes else (DYNAMIC, DynamicRope)
    found = [module for module in model.modules() if getattr(module, "rope_type", None) == kind]
    for module in found:
        theirs: Any = type(module)
        compute = inspect.unwrap(theirs.forward)
        if compute is theirs.forward or not _takes_rows(compute, module.inv_freq.shape[0]):  # type: ignore[arg-type,index]
            raise _unsupported(kind, "in a rotary module of another form")
        module.__class__ = type(theirs.__name__, (ours, theirs), {"__module__": theirs.__module__})
        module.compute, module.angles, module.step = compute, angles, None  # type: ignore[assignment]
    if not found:
        raise _unsupported(kind, "in a rotary module of another form")


def _takes_rows(compute: Callable[..., Any], num_pairs: int) -> bool:
    """Return whether the forward of a rotary module can take a row of frequencies for each token.

    It can if the result for several tokens equals the results for each token alone. compute: the forward. num_pairs:
    the number of frequencies of a token.
    """
    rows_Tp, positions = torch.linspace(0.1, 1, 3 * num_pairs).view(3, num_pairs), torch.tensor([[4, 5, 6]])
    x = torch.zeros(1, 3, 1)
    try:
        whole = compute(_Parts(rows_Tp, 1.5), x, positions)
        each = [compute(_Parts(rows_Tp[i], 1.5), x[:, :1], positions[:, i : i + 1]) for i in range(3)]
        return all(torch.equal(all_T, torch.cat(parts, 1)) for all_T, *parts in zip(whole, *each, strict=True))
    except Exception:  # another forward may need anything else
        return False


def add_frequencies(model: nn.Module) -> None:
    """Add to adapted rotary modules the buffers from which they compute frequencies, on the CPU."""
    for module in model.modules():
        if isinstance(module, LongRope):
            init, longer = ROPE_INIT_FUNCTIONS[LONGROPE], module.angles.border + 1
            frequencies, _ = init(module.config, torch.device("cpu"), seq_len=longer)
            module.register_buffer("long_inv_freq", frequencies, persistent=False)  # type: ignore[attr-defined]
        elif isinstance(module, DynamicRope):
            dim = 2 * module.inv_freq.shape[0]
            exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
            module.register_buffer("exponents", exponents, persistent=False)  # type: ignore[attr-defined]


def _unsupported(kind: str, where: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"its rotary angles depend on a request's length (rope_type is {kind!r}) {where}")
