"""The custom ops of attention.

There are four: write K and V to the paged cache and attend (`attention`); attend to a cache that already has them
(`attend`); write latent rows and attend, with the weight that expands rows (`latent_attention`); and attend among the
tokens of each request, without a cache (`attend_packed`). They mutate their arguments, so the graph is split around
them (graphs/compiler/split.py).

Models from transformers may change tensors in place, which no tracer can functionalise around an op that mutates its
arguments. So their traces have functional stand-ins, named `..._value`; `passes.layout.lowering` replaces these by the
ops.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NoReturn, get_type_hints

import torch

from compiled_engine.attention.backend import get_backend
from compiled_engine.attention.inputs import AttentionInputs, Rotation, Scoring
from compiled_engine.attention.latents import LatentHeads

_OF_FIELDS = {"str": "str", "torch.Tensor": "Tensor", "torch.Tensor | None": "Tensor?"}
_INPUTS = ", ".join(f"{_OF_FIELDS[str(field.type)]} {field.name}" for field in fields(AttentionInputs))
# The last arguments of the ops: the fields of Scoring, then those of AttentionInputs.
SCORING_AND_INPUTS = (
    f"float scale, SymInt sliding_window, float soft_cap, Tensor? sinks_H, Tensor? kv_scales_2K, {_INPUTS}"
)
_TYPES: dict[Any, str] = {
    torch.Tensor | None: "Tensor?",
    torch.Tensor: "Tensor",
    float: "float",
    int: "int",
    bool: "bool",
}
# Arguments of ops that norm and rotate q and k: the fields of Rotation.
ROTATION = ", ".join(f"{_TYPES[kind]} {name}" for name, kind in get_type_hints(Rotation).items())
# Called in place of an attention op, with its function and its arguments.
OnAttention = Callable[[Callable[..., None], tuple[Any, ...]], None]
# The argument that the functional stand-ins lack.
_OUT = re.compile(r"Tensor\(\w!\) out_THd, ")


def write_kv(
    k_TKd: torch.Tensor,
    v_TKd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    kv_scales_2K: torch.Tensor | None,
    backend: str,
) -> None:
    """Store each token's K and V at its slot; slot -1 stores nothing. All backends share the layout of the cache."""
    get_backend(backend).write_kv(k_TKd, v_TKd, kv_cache_N2PKd, slot_mapping_T, kv_scales_2K)


def attend(
    q_THd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    out_THd: torch.Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    sinks_H: torch.Tensor | None,
    kv_scales_2K: torch.Tensor | None,
    *fields_of_inputs: Any,
) -> None:
    """Write to `out_THd` the attention over a cache that already has this step's K and V.

    scale to kv_scales_2K: the fields of Scoring. fields_of_inputs: the fields of AttentionInputs, in order.
    """
    inputs = AttentionInputs(*fields_of_inputs)
    scoring = Scoring(scale, sliding_window, soft_cap, sinks_H, kv_scales_2K)
    get_backend(inputs.backend).attend(q_THd, kv_cache_N2PKd, out_THd, inputs, scoring)


def write_and_attend(
    q_THd: torch.Tensor,
    k_TKd: torch.Tensor,
    v_TKd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    out_THd: torch.Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    sinks_H: torch.Tensor | None,
    kv_scales_2K: torch.Tensor | None,
    *fields_of_inputs: Any,
) -> None:
    """Store this step's K and V, then write to `out_THd` the attention over the cache; see `attention`."""
    inputs = AttentionInputs(*fields_of_inputs)
    write_kv(k_TKd, v_TKd, kv_cache_N2PKd, inputs.slot_mapping_T, kv_scales_2K, inputs.backend)
    scoring = Scoring(scale, sliding_window, soft_cap, sinks_H, kv_scales_2K)
    get_backend(inputs.backend).attend(q_THd, kv_cache_N2PKd, out_THd, inputs, scoring)


def write_and_attend_latents(
    q_THd: torch.Tensor,
    row_T1w: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    out_THd: torch.Tensor,
    weight_Cr: torch.Tensor,
    scale: float,
    *fields_of_inputs: Any,
) -> None:
    """Store this step's latent rows, then write to `out_THd` the attention over the cache; see `latent_attention`."""
    inputs = AttentionInputs(*fields_of_inputs)
    backend = get_backend(inputs.backend)
    backend.write_latents(row_T1w, kv_cache_N2PKd, inputs.slot_mapping_T, weight_Cr.shape[1])
    backend.attend_latents(q_THd, weight_Cr, kv_cache_N2PKd, out_THd, inputs, scale)


def attend_packed(
    q_THd: torch.Tensor,
    k_TKd: torch.Tensor,
    v_TKd: torch.Tensor,
    out_THd: torch.Tensor,
    biases_HW: torch.Tensor | None,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    sinks_H: torch.Tensor | None,
    kv_scales_2K: torch.Tensor | None,
    *fields_of_inputs: Any,
) -> None:
    """Write to `out_THd` the bidirectional attention among the tokens of each request; see `packed_attention`."""
    inputs = AttentionInputs(*fields_of_inputs)
    scoring = Scoring(scale, sliding_window, soft_cap, sinks_H, kv_scales_2K)
    get_backend(inputs.backend).attend_packed(q_THd, k_TKd, v_TKd, out_THd, inputs, scoring, biases_HW)


def _returns_nothing(*args: object) -> None:
    """Implement the ops for fake tensors: do nothing, since the ops return nothing."""


attend_op = torch.library.custom_op(
    "compiled_engine::attend",
    attend,
    mutates_args=("out_THd",),
    schema=f"(Tensor q_THd, Tensor kv_cache_N2PKd, Tensor(a!) out_THd, {SCORING_AND_INPUTS}) -> ()",
)
attend_op.register_fake(_returns_nothing)
attention_op = torch.library.custom_op(
    "compiled_engine::attention",
    write_and_attend,
    mutates_args=("kv_cache_N2PKd", "out_THd"),
    schema="(Tensor q_THd, Tensor k_TKd, Tensor v_TKd, Tensor(a!) kv_cache_N2PKd, Tensor(b!) out_THd, "
    f"{SCORING_AND_INPUTS}) -> ()",
)
attention_op.register_fake(_returns_nothing)
latent_op = torch.library.custom_op(
    "compiled_engine::latent_attention",
    write_and_attend_latents,
    mutates_args=("kv_cache_N2PKd", "out_THd"),
    schema="(Tensor q_THd, Tensor row_T1w, Tensor(a!) kv_cache_N2PKd, Tensor(b!) out_THd, Tensor weight_Cr, "
    f"float scale, {_INPUTS}) -> ()",
)
latent_op.register_fake(_returns_nothing)
packed_op = torch.library.custom_op(
    "compiled_engine::attend_packed",
    attend_packed,
    mutates_args=("out_THd",),
    schema="(Tensor q_THd, Tensor k_TKd, Tensor v_TKd, Tensor(a!) out_THd, Tensor? biases_HW, "
    f"{SCORING_AND_INPUTS}) -> ()",
)
packed_op.register_fake(_returns_nothing)

# Functions by op name, which the compiled forward calls directly, without torch's dispatcher.
ATTENTION_OPS: dict[str, Callable[..., None]] = {
    "compiled_engine::attention": write_and_attend,
    "compiled_engine::attend": attend,
    "compiled_engine::latent_attention": write_and_attend_latents,
    "compiled_engine::attend_packed": attend_packed,
}


_LIBRARY = torch.library.Library("compiled_engine", "FRAGMENT")


def call_directly(ops: dict[str, Callable[..., None]]) -> None:
    """Let PyTorch's dispatcher call these functions directly for the custom ops of these names, on CPUs and GPUs.

    custom_op wraps functions for Dynamo, which the first call would import; in eager mode that takes seconds.
    """
    for name, function in ops.items():
        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(name, function, key)


call_directly(ATTENTION_OPS)


def attention(
    q_THd: torch.Tensor,
    k_TKd: torch.Tensor,
    v_TKd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    inputs: AttentionInputs,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the causal attention [T, H, d] of this step's queries over their requests' whole contexts, in q's dtype.

    First writes k and v into the cache at inputs.slot_mapping_T. A query at position p sees keys at positions
    max(0, p - sliding_window + 1) .. p, or with sliding_window None at 0 .. p, and the later keys that
    inputs.keys_ahead_T adds. scale, soft_cap, sinks_H: see Scoring.
    """
    out_THd = torch.empty_like(q_THd, memory_format=torch.contiguous_format)
    scoring = Scoring(scale, sliding_window or 0, soft_cap or 0.0, sinks_H)
    torch.ops.compiled_engine.attention(q_THd, k_TKd, v_TKd, kv_cache_N2PKd, out_THd, *scoring, *inputs.flat())
    return out_THd


def latent_attention(
    q_THd: torch.Tensor,
    row_T1w: torch.Tensor,
    kv_cache_N1P1w: torch.Tensor,
    weight_Cr: torch.Tensor,
    inputs: AttentionInputs,
    scale: float,
) -> torch.Tensor:
    """Return the causal attention [T, H, v] of this step's queries over their requests' whole contexts, in q's dtype.

    First writes the rows into the cache at inputs.slot_mapping_T.

    q_THd: queries, whose last w - r elements belong to the rotated part of keys. row_T1w: a latent of r elements, then
    the rotated part. weight_Cr: [H * (d - (w - r) + v), r], maps a latent to each head's key, without the rotated part,
    and to its value; see latents.py. All have the same dtype, and the cache too unless it has 8 bits. The inputs must
    not have keys_ahead_T.

    While a tracer runs, the op's functional stand-in is called instead; see the module.
    """
    if torch.compiler.is_compiling():
        arguments = q_THd, row_T1w, kv_cache_N1P1w, weight_Cr, scale
        return torch.ops.compiled_engine.latent_attention_value(*arguments, *inputs.flat())
    out_THv = _like_values(q_THd, row_T1w, weight_Cr)
    written = q_THd, row_T1w, kv_cache_N1P1w, out_THv, weight_Cr, scale
    torch.ops.compiled_engine.latent_attention(*written, *inputs.flat())
    return out_THv


def packed_attention(
    q_THd: torch.Tensor,
    k_TKd: torch.Tensor,
    v_TKd: torch.Tensor,
    inputs: AttentionInputs,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    biases_HW: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the bidirectional attention [T, H, d], in q's dtype, among the tokens of each request.

    All tokens of a request must be in this step.

    A query at position p sees keys at positions between p - sliding_window and p + sliding_window, both excluded; all
    keys if sliding_window is None. scale, soft_cap, sinks_H: see Scoring.

    biases_HW: biases of scores by relative position, contiguous, in any float dtype, without a soft cap. The score of a
    query at position p and a key at position j is scale * (q . k) + biases[h, min(max(j - p, -c), c) + c], where W is
    2 c + 1: keys that are further than c tokens away have the bias of those at the distance c.

    While a tracer runs, the op's functional stand-in is called instead; see the module.
    """
    scoring = Scoring(scale, sliding_window or 0, soft_cap or 0.0, sinks_H)
    if torch.compiler.is_compiling():
        return torch.ops.compiled_engine.attend_packed_value(q_THd, k_TKd, v_TKd, biases_HW, *scoring, *inputs.flat())
    out_THd = torch.empty_like(q_THd, memory_format=torch.contiguous_format)
    torch.ops.compiled_engine.attend_packed(q_THd, k_TKd, v_TKd, out_THd, biases_HW, *scoring, *inputs.flat())
    return out_THd


def _never_executed(*arguments: object) -> NoReturn:
    raise RuntimeError("the value of an attention op exists only in traces and cannot be executed")


def _like_values(q_THd: torch.Tensor, row_T1w: torch.Tensor, weight_Cr: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised tensor [T, H, v] with the heads of q and the head size of latent attention's values."""
    heads = LatentHeads.of(q_THd, weight_Cr, row_T1w.shape[-1])
    return q_THd.new_empty(q_THd.shape[0], heads.num_heads, heads.value)


def _like_queries(q_THd: torch.Tensor, *others: object) -> torch.Tensor:
    return torch.empty_like(q_THd, memory_format=torch.contiguous_format)


def _define_value(op: torch.library.CustomOpDef, fake: Callable[..., torch.Tensor] = _like_queries) -> None:
    """Define the functional stand-in `NAME_value` of an op, for traces.

    The stand-in returns the result that the op writes to out_THd. It cannot be run.

    fake: returns a tensor like the result.
    """
    schema = op._opoverload._schema
    arguments, replaced = _OUT.subn("", str(schema).partition("(")[2].rpartition(" -> ")[0])
    assert replaced == 1
    value = torch.library.custom_op(
        f"{schema.name}_value",
        _never_executed,
        mutates_args=(),
        schema=f"({arguments.replace('(a!)', '')} -> Tensor",
    )
    value.register_fake(fake)


_define_value(attention_op)
_define_value(attend_op)
_define_value(latent_op, lambda q_THd, row_T1w, cache, weight_Cr, *others: _like_values(q_THd, row_T1w, weight_Cr))
_define_value(packed_op)

ATTEND = torch.ops.compiled_engine.attend.default
ATTEND_VALUE = torch.ops.compiled_engine.attend_value.default
ATTENTION = torch.ops.compiled_engine.attention.default
ATTENTION_VALUE = torch.ops.compiled_engine.attention_value.default
LATENT_ATTENTION = torch.ops.compiled_engine.latent_attention.default
LATENT_ATTENTION_VALUE = torch.ops.compiled_engine.latent_attention_value.default
ATTEND_PACKED = torch.ops.compiled_engine.attend_packed.default
ATTEND_PACKED_VALUE = torch.ops.compiled_engine.attend_packed_value.default


def attention_or_value(
    q_THd: torch.Tensor,
    k_TKd: torch.Tensor,
    v_TKd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    inputs: AttentionInputs,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the result of `attention`. While a tracer runs, call its functional stand-in instead; see the module."""
    if torch.compiler.is_compiling():
        scoring = Scoring(scale, sliding_window or 0, soft_cap or 0.0, sinks_H)
        return torch.ops.compiled_engine.attention_value(q_THd, k_TKd, v_TKd, kv_cache_N2PKd, *scoring, *inputs.flat())
    return attention(q_THd, k_TKd, v_TKd, kv_cache_N2PKd, inputs, scale, sliding_window, soft_cap, sinks_H)


def attend_or_value(
    q_THd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    inputs: AttentionInputs,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the result of `attention` over a cache to which another layer has written this step's keys and values.

    While a tracer runs, call the op's functional stand-in instead.
    """
    scoring = Scoring(scale, sliding_window or 0, soft_cap or 0.0, sinks_H)
    if torch.compiler.is_compiling():
        return torch.ops.compiled_engine.attend_value(q_THd, kv_cache_N2PKd, *scoring, *inputs.flat())
    out_THd = torch.empty_like(q_THd, memory_format=torch.contiguous_format)
    torch.ops.compiled_engine.attend(q_THd, kv_cache_N2PKd, out_THd, *scoring, *inputs.flat())
    return out_THd
