"""Fuses the norm of q and k (in models such as Qwen3), their rotation, and the write of k and v to the KV cache.

Why: a decode step processes a few kilobytes here. One or two pointwise kernels and the cache write would run one after
another, each taking longer to launch than to run. The rest of attention is the op `attend`, which reads the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from compiled_engine.attention.inputs import Rotation
from compiled_engine.attention.kv_codes import kernels_convert
from compiled_engine.attention.op import ROTATION, write_kv
from compiled_engine.kv_format import head_dim_of, is_coded
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement, SplittingOp
from compiled_engine.passes.framework.matching import (
    always_equal,
    arg,
    aten,
    emit,
    emit_named,
    is_call,
    named,
    rewrite_calls,
)
from compiled_engine.passes.norm import rms_norm
from compiled_engine.passes.rope import rope_kv_write_kernel
from compiled_engine.passes.rope.rope_match import Rotated, match_rotation, rotary_attentions


def reference(q_THd: torch.Tensor, k_TKd: torch.Tensor, *rotation: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (q, k), normed if they have norm weights, and rotated. Values are rounded after each op, as in models.

    rotation: the fields of Rotation (attention/inputs.py). cos and sin have a value per rotated element, or one per
    pair of elements that are rotated together.
    """
    how = Rotation(*rotation)
    eps, cos_T1r, sin_T1r, interleaved = how.eps, how.cos_T1d, how.sin_T1d, how.interleaved
    rotary_dim = how.rotary_dim or q_THd.shape[-1]
    if cos_T1r.shape[-1] != rotary_dim:
        cos_T1r, sin_T1r = (_doubled(angles, interleaved) for angles in (cos_T1r, sin_T1r))

    def rotated(x_THd: torch.Tensor, weight_d: torch.Tensor | None) -> torch.Tensor:
        if weight_d is not None and not how.norm_last:
            x_THd = rms_norm.reference(x_THd, weight_d, eps, how.norm_offset, how.norm_wide)
        x_THr = x_THd[..., :rotary_dim].float() if how.wide else x_THd[..., :rotary_dim]
        if interleaved:
            turned_THr = torch.stack((-x_THr[..., 1::2], x_THr[..., ::2]), dim=-1).flatten(-2)
        else:
            first, second = x_THr.chunk(2, dim=-1)
            turned_THr = torch.cat((-second, first), dim=-1)
        y_THr = (x_THr * cos_T1r + turned_THr * sin_T1r).to(x_THd.dtype)
        y_THd = y_THr if rotary_dim == x_THd.shape[-1] else torch.cat((y_THr, x_THd[..., rotary_dim:]), dim=-1)
        if weight_d is not None and how.norm_last:
            y_THd = rms_norm.reference(y_THd, weight_d, eps, how.norm_offset, how.norm_wide)
        return y_THd

    return rotated(q_THd, how.q_norm_weight_d), rotated(k_TKd, how.k_norm_weight_d)


def _doubled(angles_T1p: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Return cos or sin for each element of a head, [T, 1, 2 p], from those of each pair of elements, [T, 1, p].

    interleaved: the elements of a pair are neighbours; otherwise they are p apart.
    """
    return angles_T1p.repeat_interleave(2, dim=-1) if interleaved else torch.cat((angles_T1p, angles_T1p), dim=-1)


def rope_kv_write(
    q_THd: torch.Tensor,
    k_TKd: torch.Tensor,
    v_TKd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    kv_scales_2K: torch.Tensor | None,
    *rotation: Any,
) -> torch.Tensor:
    """Norm and rotate q and k as `reference` does, store k and v in the cache, and return q, contiguous [T, H, d].

    k and v of a token are stored at the token's slot; those of a token with slot -1 are not stored. q, k and v may be
    views of one tensor, with any strides from token to token and head to head. kv_scales_2K, rotation: the
    field of Scoring, and all fields of Rotation (attention/inputs.py). The compiled forward calls this function
    directly, without torch's dispatcher. On a CPU, and for a cache whose dtype kernels cannot convert to on this GPU,
    plain torch does all of this.
    """
    if q_THd.is_cuda and kernels_convert(kv_cache_N2PKd.dtype, q_THd.device):
        return rope_kv_write_kernel.launch(q_THd, k_TKd, v_TKd, kv_cache_N2PKd, slot_mapping_T, kv_scales_2K, *rotation)
    rotated_THd, rotated_TKd = reference(q_THd, k_TKd, *rotation)
    write_kv(rotated_TKd, v_TKd, kv_cache_N2PKd, slot_mapping_T, kv_scales_2K, "torch")
    return rotated_THd.contiguous()


torch.library.custom_op(
    "compiled_engine::rope_kv_write",
    rope_kv_write,
    mutates_args=("kv_cache_N2PKd",),
    schema="(Tensor q_THd, Tensor k_TKd, Tensor v_TKd, Tensor(a!) kv_cache_N2PKd, Tensor slot_mapping_T, "
    f"Tensor? kv_scales_2K, {ROTATION}) -> Tensor",
).register_fake(lambda q_THd, *others: torch.empty_like(q_THd, memory_format=torch.contiguous_format))


ATTENTION = torch.ops.compiled_engine.attention.default
ATTEND = torch.ops.compiled_engine.attend.default
FUSED = torch.ops.compiled_engine.rope_kv_write.default


class RopeKVWrite(GraphPass):
    name = "rope_kv_write"
    splitting_ops = (SplittingOp("compiled_engine::rope_kv_write", rope_kv_write),)

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        return rotary_attentions(graph)

    def run(self, graph: fx.Graph) -> PassResult:
        return rewrite_calls(graph, ATTENTION, _rewrite)


def _match(attention: fx.Node) -> tuple[Rotated, Rotated] | str:
    """Return the rotations of an attention call's q and k, or why rope_kv_write cannot compute them."""
    if attention.kwargs:
        return "it is called with keywords"
    rotated_q, rotated_k, v, cache, out = (arg(attention, i) for i in range(5))
    readers = {attention, out} if is_call(out, aten.empty_like.default) else {attention}
    if out is rotated_q or not set(rotated_q.users) <= readers:
        return "the rotated q is used elsewhere too"
    if set(rotated_k.users) != {attention}:
        return "the rotated k is used elsewhere too"
    q, k = match_rotation(rotated_q), match_rotation(rotated_k)
    if isinstance(q, str):
        return f"q: {q}"
    if isinstance(k, str):
        return f"k: {k}"
    if isinstance(match_rotation(v), Rotated):
        return "v is rotated too"
    if q.cos is not k.cos or q.sin is not k.sin:
        return "q and k are rotated by different angles"
    if q.form != k.form:
        return "q and k are rotated in different ways"
    if (q.norm_weight is None) != (k.norm_weight is None) or q.how != k.how:
        return "q and k are normed differently"
    return _obstacle(q, k, v, cache) or (q, k)


def _obstacle(q: Rotated, k: Rotated, v: fx.Node, cache: fx.Node) -> str | None:
    """Return why rope_kv_write does not support the shapes, strides or dtypes of these values; None if it does."""
    values = [node.meta["val"] for node in (q.x, k.x, v, q.cos, q.sin, cache)]
    q_THd, k_TKd, v_TKd, cos_T1d, sin_T1d, cache_N2PKd = values
    dtypes = {value.dtype for value in (q_THd, k_TKd, v_TKd, cache_N2PKd) if not is_coded(value.dtype)}
    if len(dtypes) > 1 or not {cos_T1d.dtype, sin_T1d.dtype} <= dtypes | ({torch.float32} if q.form.wide else set()):
        return f"the dtypes of q, k, v, cos, sin and cache differ: {', '.join(str(value.dtype) for value in values)}"
    if any(value.dim() != 3 or not always_equal(value.stride(-1), 1) for value in values[:5]):
        return "q, k, v, cos or sin is not [tokens, heads, head size] with the elements of a head in a row"
    tokens, _, head_dim = q_THd.shape
    rotary_dim = q.form.rotary_dim or head_dim
    widths = [w for w in (rotary_dim, rotary_dim // 2) if _equal(cos_T1d.shape, (tokens, 1, w))]
    if not widths or not _equal(sin_T1d.shape, (tokens, 1, widths[0])) or rotary_dim % 2 or head_dim % 2:
        return "cos or sin is not [tokens, 1, head size]"
    kv_shape = (tokens, cache_N2PKd.shape[3], head_dim_of(cache_N2PKd))
    if not (_equal(k_TKd.shape, kv_shape) and _equal(v_TKd.shape, kv_shape) and _equal(kv_shape[2:], (head_dim,))):
        return "the shapes of q, k, v and cache do not go together"
    return None


def _equal(left: Sequence[int | torch.SymInt], right: Sequence[int | torch.SymInt]) -> bool:
    return len(left) == len(right) and all(map(always_equal, left, right))


def _rewrite(graph: fx.Graph, attention: fx.Node) -> list[Replacement] | str:
    found = _match(attention)
    if isinstance(found, str):
        return found
    q, k = found
    arguments = named(attention)
    out = arguments["out_THd"]
    if arguments["q_THd"] in out.all_input_nodes:
        # The buffer must be allocated before the op, or it would need a piece of its own between the op and attend.
        out.args = (q.x, *out.args[1:])
        out.kwargs = {**out.kwargs, "memory_format": torch.contiguous_format}
    with graph.inserting_before(attention):
        # A rotation is linear, so a factor applied after it may be applied before.
        scaled = [r.x if r.scale is None else emit(graph, aten.mul.Tensor, r.x, r.scale) for r in (q, k)]
        eps, norm_offset, norm_wide = q.how
        arguments |= {
            **{"q_THd": scaled[0], "k_TKd": scaled[1], "cos_T1d": q.cos, "sin_T1d": q.sin},
            **{"q_norm_weight_d": q.norm_weight, "k_norm_weight_d": k.norm_weight, "eps": eps},
            **{"norm_offset": norm_offset, "norm_wide": norm_wide, **q.form._asdict()},
        }
        fused = emit_named(graph, FUSED, arguments)
        attend = emit_named(graph, ATTEND, arguments | {"q_THd": fused})
    graph.erase_node(attention)
    return [Replacement(attention.name, attend)]
