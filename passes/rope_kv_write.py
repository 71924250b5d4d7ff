"""q and k become one kernel from the linear to the cache: norm (Qwen3 has one), rotation, and the write of k and v.

Why: at decode sizes these are a few kilobytes that a pointwise kernel or two and the write handle one after another,
and each launch costs more than the work. Of attention what remains is `attend`, which reads the cache.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from compiled_engine.attention.inputs import inputs_of
from compiled_engine.attention.op import write_kv
from compiled_engine.passes import rms_norm, rope_kv_write_kernel
from compiled_engine.passes.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.matching import always_equal, arg, aten, emit, factors, is_call, rewrite_calls
from compiled_engine.passes.rms_norm import match_rms_norm
from compiled_engine.passes.structure import Structure


def reference(
    q_THd: torch.Tensor,
    k_TKd: torch.Tensor,
    q_norm_weight_d: torch.Tensor | None,
    k_norm_weight_d: torch.Tensor | None,
    eps: float,
    cos_T1d: torch.Tensor,
    sin_T1d: torch.Tensor,
    norm_offset: float = 0.0,
    norm_wide: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k normed (where there is a weight) and rotated, rounded to their dtype after each op as the models do."""

    def rotated(x_THd: torch.Tensor, weight_d: torch.Tensor | None) -> torch.Tensor:
        if weight_d is not None:
            x_THd = rms_norm.reference(x_THd, weight_d, eps, norm_offset, norm_wide)
        first, second = x_THd.chunk(2, dim=-1)
        return x_THd * cos_T1d + torch.cat((-second, first), dim=-1) * sin_T1d

    return rotated(q_THd, q_norm_weight_d), rotated(k_TKd, k_norm_weight_d)


def rope_kv_write(
    q_THd: torch.Tensor,
    k_TKd: torch.Tensor,
    v_TKd: torch.Tensor,
    q_norm_weight_d: torch.Tensor | None,
    k_norm_weight_d: torch.Tensor | None,
    eps: float,
    cos_T1d: torch.Tensor,
    sin_T1d: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    norm_offset: float = 0.0,
    norm_wide: bool = False,
) -> torch.Tensor:
    """Norm and rotate q and k as `reference` does, store k and v at each token's slot, and return q [T, H, d].

    q, k and v may be views of one tensor, with any strides of tokens and heads; the result is contiguous. Slot -1
    stores nothing. The compiled forward calls this directly, without torch's dispatcher.
    """
    arguments, norm = (q_norm_weight_d, k_norm_weight_d, eps, cos_T1d, sin_T1d), (norm_offset, norm_wide)
    if q_THd.is_cuda:
        return rope_kv_write_kernel.launch(q_THd, k_TKd, v_TKd, *arguments, kv_cache_N2PKd, slot_mapping_T, *norm)
    rotated_THd, rotated_TKd = reference(q_THd, k_TKd, *arguments, *norm)
    write_kv(rotated_TKd, v_TKd, kv_cache_N2PKd, slot_mapping_T, "torch")
    return rotated_THd.contiguous()


rope_kv_write_op = torch.library.custom_op(
    "compiled_engine::rope_kv_write", rope_kv_write, mutates_args=("kv_cache_N2PKd",)
)


@rope_kv_write_op.register_fake
def _(q_THd: torch.Tensor, *others: object) -> torch.Tensor:
    return torch.empty_like(q_THd, memory_format=torch.contiguous_format)


ATTENTION = torch.ops.compiled_engine.attention.default
ATTEND = torch.ops.compiled_engine.attend.default
FUSED = torch.ops.compiled_engine.rope_kv_write.default


@dataclass(frozen=True)
class _Rotated:
    """What a rotated value was made of; without a norm, norm_weight is None. how: eps, offset and wide of the norm."""

    x: fx.Node
    norm_weight: fx.Node | None
    how: tuple[float, float, bool]
    cos: fx.Node
    sin: fx.Node


class RopeKVWrite(GraphPass):
    name = "rope_kv_write"

    def contract(self, structure: Structure, compile_range: CompileRange) -> int:
        return structure.turned_attentions

    def run(self, graph: fx.Graph) -> PassResult:
        return rewrite_calls(graph, ATTENTION, _rewrite)


def _match(attention: fx.Node) -> tuple[_Rotated, _Rotated] | str:
    """What q and k of an attention were made of, or why the op cannot make them."""
    if attention.kwargs:
        return "it is called with keywords"
    rotated_q, rotated_k, v, cache, out = (arg(attention, i) for i in range(5))
    readers = {attention, out} if is_call(out, aten.empty_like.default) else {attention}
    if out is rotated_q or not set(rotated_q.users) <= readers:
        return "the rotated q is used elsewhere too"
    if set(rotated_k.users) != {attention}:
        return "the rotated k is used elsewhere too"
    q, k = _rotated(rotated_q), _rotated(rotated_k)
    if isinstance(q, str):
        return f"q: {q}"
    if isinstance(k, str):
        return f"k: {k}"
    if isinstance(_rotated(v), _Rotated):
        return "v is rotated too"
    if q.cos is not k.cos or q.sin is not k.sin:
        return "q and k are rotated by different angles"
    if (q.norm_weight is None) != (k.norm_weight is None) or q.how != k.how:
        return "q and k are normed differently"
    return _obstacle(q, k, v, cache) or (q, k)


def _rotated(value: fx.Node) -> _Rotated | str:
    """x * cos + (-second half of x, first half of x) * sin, where x may be normed; or why the value is not that."""
    if is_call(value, aten._to_copy.default):
        return "a cast follows the rotation"
    if is_call(value, aten.cat.default):
        return "only a part of each head is rotated"
    if not is_call(value, aten.add.Tensor) or value.kwargs:
        return "it is not rotated"
    found = [
        (x, cos, sin)
        for straight, turned in (value.args, value.args[::-1])
        for turned_x, sin in factors(turned)
        for x, cos in factors(straight)
        if _turned_from(turned_x) is x
    ]
    if not found:
        return "it is not x * cos + (-second half, first half) * sin of one x"
    rotated, cos, sin = found[0]
    normed = match_rms_norm(rotated)
    if isinstance(normed, str):
        return normed
    if normed is None:
        return _Rotated(rotated, None, (0.0, 0.0, False), cos, sin)
    return _Rotated(normed.x, normed.weight, normed[2:], cos, sin)


def _turned_from(node: Any) -> fx.Node | None:
    """The x of which the node is cat((-second half, first half)) along the last dimension."""
    if not is_call(node, aten.cat.default) or len(node.args) != 2 or len(arg(node, 0)) != 2:
        return None
    (negated, first), dim = node.args
    if not is_call(negated, aten.neg.default) or not _is_last(dim, node):
        return None
    x = _half(first, 0)
    return x if x is not None and _half(arg(negated, 0), 1) is x else None


def _half(node: Any, index: int) -> fx.Node | None:
    """The x of whose last dimension the node is the first (index 0) or second half, as chunk or slices give it."""
    if is_call(node, operator.getitem) and is_call(node.args[0], aten.split.Tensor):
        x, size, *dim = node.args[0].args
        if node.args[1] == index and dim and _is_last(dim[0], x) and 2 * size == x.meta["val"].shape[-1]:
            return x
    if is_call(node, aten.slice.Tensor) and len(node.args) == 4:
        x, dim, start, end = node.args
        size = x.meta["val"].shape[-1]
        if _is_last(dim, x) and (start, min(end, size)) == ((0, size // 2), (size // 2, size))[index]:
            return x
    return None


def _is_last(dim: int, x: fx.Node) -> bool:
    return dim in (-1, x.meta["val"].dim() - 1)


def _obstacle(q: _Rotated, k: _Rotated, v: fx.Node, cache: fx.Node) -> str | None:
    """What in the shapes, strides or dtypes of the parts does not fit the op."""
    values = [node.meta["val"] for node in (q.x, k.x, v, q.cos, q.sin, cache)]
    q_THd, k_TKd, v_TKd, cos_T1d, sin_T1d, cache_N2PKd = values
    if len({value.dtype for value in values}) > 1:
        return f"the dtypes of q, k, v, cos, sin and cache differ: {', '.join(str(value.dtype) for value in values)}"
    if any(value.dim() != 3 or not always_equal(value.stride(-1), 1) for value in values[:5]):
        return "q, k, v, cos or sin is not [tokens, heads, head size] with the elements of a head in a row"
    tokens, _, head_dim = q_THd.shape
    if not (_equal(cos_T1d.shape, (tokens, 1, head_dim)) and _equal(sin_T1d.shape, (tokens, 1, head_dim))):
        return "cos or sin is not [tokens, 1, head size]"
    kv_shape = (tokens, *cache_N2PKd.shape[3:])
    if not (_equal(k_TKd.shape, kv_shape) and _equal(v_TKd.shape, kv_shape) and _equal(kv_shape[2:], (head_dim,))):
        return "the shapes of q, k, v and cache do not go together"
    return None


def _equal(left: Sequence[int | torch.SymInt], right: Sequence[int | torch.SymInt]) -> bool:
    """Whether two shapes are equal for every size that they may have."""
    return len(left) == len(right) and all(map(always_equal, left, right))


def _rewrite(graph: fx.Graph, attention: fx.Node) -> list[Replacement] | str:
    """Put the two ops in attention's place."""
    found = _match(attention)
    if isinstance(found, str):
        return found
    q, k = found
    rotated_q, _, v, cache, out = (arg(attention, i) for i in range(5))
    if rotated_q in out.all_input_nodes:
        # The buffer must not come after the op: a piece with nothing else would stand between it and attend.
        out.args = (q.x, *out.args[1:])
        out.kwargs = {**out.kwargs, "memory_format": torch.contiguous_format}
    with graph.inserting_before(attention):
        eps, *norm = q.how
        norm_and_angles = q.norm_weight, k.norm_weight, eps, q.cos, q.sin
        slots = inputs_of(attention.args).slot_mapping_T
        fused = emit(graph, FUSED, q.x, k.x, v, *norm_and_angles, cache, slots, *norm)
        attend = emit(graph, ATTEND, fused, *attention.args[3:])
    graph.erase_node(attention)
    return [Replacement(attention.name, attend)]
