"""Attention as a function of its arguments: what a trace of foreign code sees, so that it can be functionalised.

Foreign code may change tensors in place, and no tracer makes that functional around an op that mutates its arguments.
So the trace holds this op, which pretends to write nothing, and `passes.foreign_attention` puts `attention` back.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.attention.op import attention, attention_op

_OUT = "Tensor(b!) out_THd, "


def _never_executed(*arguments: object) -> NoReturn:
    raise RuntimeError("compiled_engine::attention_value stands in traces alone and cannot be executed")


def _fake(q_THd: torch.Tensor, *others: object) -> torch.Tensor:
    return torch.empty_like(q_THd, memory_format=torch.contiguous_format)


def _schema() -> str:
    """That of the op that it stands for, without the buffer for the result and without writes."""
    arguments = str(attention_op._opoverload._schema).partition("(")[2].rpartition(" -> ")[0]
    assert _OUT in arguments
    return f"({arguments.replace(_OUT, '').replace('(a!)', '')} -> Tensor"


attention_value_op = torch.library.custom_op(
    "compiled_engine::attention_value", _never_executed, mutates_args=(), schema=_schema()
)
attention_value_op.register_fake(_fake)

ATTENTION = torch.ops.compiled_engine.attention.default
ATTENTION_VALUE = torch.ops.compiled_engine.attention_value.default


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
    """`attention`, or where it is traced the op that stands for it; see there."""
    if torch.compiler.is_compiling():
        scoring = scale, sliding_window or 0, soft_cap or 0.0, sinks_H
        return torch.ops.compiled_engine.attention_value(q_THd, k_TKd, v_TKd, kv_cache_N2PKd, *scoring, *inputs.flat())
    return attention(q_THd, k_TKd, v_TKd, kv_cache_N2PKd, inputs, scale, sliding_window, soft_cap, sinks_H)
