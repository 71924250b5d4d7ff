"""Registers the engine's attention and experts with transformers. `Step` holds a step's arguments for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.moe import ExpertsInterface

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.attention.op import (
    attend_or_value,
    attention_or_value,
    latent_attention,
    packed_attention,
)
from compiled_engine.models.foreign.latents import LatentAttention
from compiled_engine.recurrence.sequences import Sequences

# A step's arguments for attention, passed beside transformers' code.


class Step:
    """A step's arguments for attention, shared by all attention modules of a model; the model's forward sets them.

    Keyword arguments would be simpler, but not all families pass them on to their attention.
    """

    def __init__(self, sliding_windows: Sequence[int | None], reading: Iterable[int] = ()) -> None:
        self.sliding_windows = tuple(sliding_windows)  # by layer, the same in every step
        self.reading = frozenset(reading)  # layers that only read their KV cache, which is an earlier layer's
        self.inputs: AttentionInputs | None = None
        self.hands_on = False  # only the model's head is to run; the decoder returns its input
        self.positions_T: torch.Tensor | None = None
        self.kv_caches: list[torch.Tensor] = []
        self.rows_R: torch.Tensor | None = None  # see recurrence.sequences; None without recurrences
        # See attention.inputs.ANGLE_LENGTHS; None unless rotary angles depend on the lengths of requests.
        self.angle_lengths_T: torch.Tensor | None = None

    def sequences(self) -> Sequences:
        """Return the assignment of the step's tokens to requests, in the form that the ops of recurrences take."""
        inputs = self.inputs
        assert inputs is not None
        assert self.rows_R is not None
        return Sequences(self.rows_R, inputs.query_start_loc_R1, inputs.seq_lens_R, inputs.host_3)


# Experts for transformers' `ExpertsInterface`, written as in the textbook; a pass turns them into one op.

NAME = "compiled_engine"


class UnknownExpertsError(ValueError):
    """Raised for experts that are not gated MLPs as the engine computes them; the message names the difference."""


def all_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of the experts' outputs for each token, [T, D].

    module: holds the experts' parameters. hidden_states: [T, D]. top_k_index, top_k_weights: the experts chosen for
    each token and their weights, [T, X]. Every expert computes every token; see models/textbook/experts.py. Raises
    UnknownExpertsError for experts that are computed in another way.
    """
    _require_known(module)
    gate_up, down = module.gate_up_proj, module.down_proj
    if not module.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    num_experts = gate_up.shape[0]
    none_TE = top_k_weights.new_zeros((top_k_weights.shape[0], num_experts))
    weights_TE = none_TE.scatter(-1, top_k_index, top_k_weights).to(hidden_states.dtype)
    gate_up_ETI = torch.bmm(hidden_states.expand(num_experts, -1, -1), gate_up)
    if module.has_bias:
        gate_up_ETI = gate_up_ETI + module.gate_up_proj_bias.unsqueeze(1)
    y_ETD = torch.bmm(module._apply_gate(gate_up_ETI), down)
    if module.has_bias:
        y_ETD = y_ETD + module.down_proj_bias.unsqueeze(1)
    return (y_ETD * weights_TE.t().unsqueeze(-1)).sum(0)


def experts_by_columns(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield (module, parameter name) of each expert weight that has the shape [E, in, out].

    The kernels need these weights in the memory order [E, out, in].
    """
    for module in model.modules():
        if getattr(module, "is_transposed", False) and hasattr(module, "gate_up_proj"):
            yield from ((module, name) for name in ("gate_up_proj", "down_proj"))


def _require_known(module: Any) -> None:
    own_gate = type(module)._apply_gate.__module__ != ExpertsInterface.__module__
    clamped = hasattr(module, "alpha") and hasattr(module, "limit")
    has = [
        *(["a norm behind each"] if getattr(module, "has_post_expert_norm", False) else []),
        *(["a gate of their own"] if own_gate and not clamped else []),
        *([] if getattr(module, "has_gate", True) else ["no gate"]),
    ]
    if has:
        raise UnknownExpertsError(f"the experts have {', '.join(has)}; allowed: act(gate) * up, and GPT-OSS's gate")


ExpertsInterface.register(NAME, all_experts)


# transformers creates masks only for the attention implementations that it knows, so none for this one.


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the engine's attention with a KV cache. Returns ([1, T, heads, d], None).

    query, key, value: [1, heads, T, d]. module: the attention module, which has a `step` and its layer number,
    `layer_idx`. attention_mask: ignored; the step has the sliding windows that `observe` found in the model's masks.
    others: arguments that do not affect the result, which `observe` has checked.
    """
    q_THd, k_TKd, v_TKd = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    step: Any = module.step
    window = step.sliding_windows[module.layer_idx]
    cache = step.kv_caches[module.layer_idx]
    if isinstance(module, LatentAttention):  # all heads attend to one row for each token
        weight_Cr = module.kv_b_proj.weight
        return latent_attention(q_THd, k_TKd, cache, weight_Cr, step.inputs, scale).unsqueeze(0), None
    value_dim = v_TKd.shape[-1]
    width = max(q_THd.shape[-1], value_dim)  # zeros at the end of a head change no score, and no element of a value
    q_THd, k_TKd, v_TKd = (_widened(x, width) for x in (q_THd, k_TKd, v_TKd))
    if module.layer_idx in step.reading:
        out_THd = attend_or_value(q_THd, cache, step.inputs, scale, window, softcap, s_aux)
    else:
        out_THd = attention_or_value(q_THd, k_TKd, v_TKd, cache, step.inputs, scale, window, softcap, s_aux)
    return out_THd[..., :value_dim].unsqueeze(0) if value_dim < width else out_THd.unsqueeze(0), None


def _widened(x_Td: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - x_Td.shape[-1]
    return torch.cat((x_Td, x_Td.new_zeros(*x_Td.shape[:-1], missing)), -1) if missing else x_Td


AttentionInterface.register(NAME, attend)


# Attention of encoders, whose modules may lack a layer number.
PACKED_NAME = "compiled_engine_packed"


def attend_packed(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    biases_HW: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention within each text, without a KV cache. Arguments and result are those of `attend`.

    module: has `step` and, instead of `layer_idx`, its sliding window `packed_window`. biases_HW: see
    `packed_attention`.
    """
    q_THd, k_TKd, v_TKd = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    own: Any = module
    scoring = scale, own.packed_window, softcap, s_aux, biases_HW
    out_THd = packed_attention(q_THd, k_TKd, v_TKd, own.step.inputs, *scoring)
    return out_THd.unsqueeze(0), None


AttentionInterface.register(PACKED_NAME, attend_packed)
