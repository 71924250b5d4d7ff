"""Merges rope_kv_write and the attention after it into one op, which backends may run as one kernel.

Why: with few decodes, each of these kernels, and the kernel that combines splits, takes longer to start than to run.
With many decodes, memory bandwidth is unused while the kernel of rope_kv_write runs. When the op is called, the backend
decides whether it has one kernel for the batch; otherwise the kernels of both ops run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from compiled_engine.attention.backend import get_backend
from compiled_engine.attention.inputs import Rotation, Scoring, inputs_of, without_inputs
from compiled_engine.attention.op import ROTATION, SCORING_AND_INPUTS, attend
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement, SplittingOp
from compiled_engine.passes.framework.matching import emit_named, is_call, named, only_user, rewrite_calls
from compiled_engine.passes.rope import rope_kv_write
from compiled_engine.passes.rope.rope_match import rotary_attentions

# Number of the rotation's arguments, which follow the tensors that the op writes.
OF_ROTATION = len(Rotation._fields)


def rope_attend(
    q_THd: torch.Tensor,
    k_TKd: torch.Tensor,
    v_TKd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    out_THd: torch.Tensor,
    *others: Any,
) -> None:
    """Norm and rotate q and k, write k and v to the cache, and write attention's result to out_THd.

    This is rope_kv_write followed by attend, in one kernel if the backend has one for the batch. others: the fields of
    Rotation, Scoring and AttentionInputs (attention/inputs.py). The compiled forward calls this function directly,
    without torch's dispatcher.
    """
    rotation, inputs = Rotation(*others[:OF_ROTATION]), inputs_of(others)
    scoring = Scoring(*without_inputs(others)[OF_ROTATION:])
    backend = get_backend(inputs.backend)
    if not backend.attend_unrotated(q_THd, k_TKd, v_TKd, rotation, kv_cache_N2PKd, out_THd, inputs, scoring):
        unfused(attend, q_THd, k_TKd, v_TKd, kv_cache_N2PKd, out_THd, *others)


def unfused(
    attention: Callable[..., None],
    q_THd: torch.Tensor,
    k_TKd: torch.Tensor,
    v_TKd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    out_THd: torch.Tensor,
    *others: Any,
) -> None:
    """Norm, rotate, write to the cache and attend as rope_attend does, in two calls: rope_kv_write, then `attention`.

    attention: `attend`, or a function with the same arguments that postpones the call until between two CUDA graphs.
    others: see rope_attend.
    """
    slot_mapping_T = inputs_of(others).slot_mapping_T
    kv_scales_2K = Scoring(*without_inputs(others)[OF_ROTATION:]).kv_scales_2K
    rotated_THd = rope_kv_write.rope_kv_write(
        q_THd, k_TKd, v_TKd, kv_cache_N2PKd, slot_mapping_T, kv_scales_2K, *others[:OF_ROTATION]
    )
    attention(rotated_THd, kv_cache_N2PKd, out_THd, *others[OF_ROTATION:])


rope_attend_op = torch.library.custom_op(
    "compiled_engine::rope_attend",
    rope_attend,
    mutates_args=("kv_cache_N2PKd", "out_THd"),
    schema="(Tensor q_THd, Tensor k_TKd, Tensor v_TKd, Tensor(a!) kv_cache_N2PKd, Tensor(b!) out_THd, "
    f"{ROTATION}, {SCORING_AND_INPUTS}) -> ()",
)
rope_attend_op.register_fake(lambda *arguments: None)

FUSED = torch.ops.compiled_engine.rope_attend.default


class RopeAttend(GraphPass):
    name = "rope_attend"
    requires = ("rope_kv_write",)
    splitting_ops = (
        SplittingOp("compiled_engine::rope_attend", rope_attend, True, lambda attention: partial(unfused, attention)),
    )

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        return rotary_attentions(graph)

    def run(self, graph: fx.Graph) -> PassResult:
        return rewrite_calls(graph, rope_kv_write.ATTEND, _rewrite)


def _rewrite(graph: fx.Graph, attend_call: fx.Node) -> list[Replacement] | str | None:
    attended = named(attend_call)
    rotated = attended["q_THd"]
    if not is_call(rotated, rope_kv_write.FUSED):
        return None
    written = named(rotated)
    if only_user(rotated) is not attend_call:
        return "the rotated q is used elsewhere too"
    if written["kv_cache_N2PKd"] is not attended["kv_cache_N2PKd"]:
        return "the cache that is written is not the one that is read"
    if written["slot_mapping_T"] is not attended["slot_mapping_T"]:
        return "the slots that are written are not those of the batch"
    with graph.inserting_before(attend_call):
        fused = emit_named(graph, FUSED, attended | written)
    graph.erase_node(attend_call)
    graph.erase_node(rotated)
    return [Replacement(attend_call.name, fused)]
