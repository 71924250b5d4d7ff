"""The one custom op of the models, attention: write K and V to the paged cache, then attend; and its second half.

Both mutate what they are given, so the graph is split around them (see compiled_engine.graphs.compiler.plan).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.attention.registry import get_backend


def write_kv(
    k_TKd: torch.Tensor,
    v_TKd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    backend: str,
) -> None:
    """Store K and V at each token's slot; slot -1 stores nothing. All backends share the layout of the cache."""
    get_backend(backend).write_kv(k_TKd, v_TKd, kv_cache_N2PKd, slot_mapping_T)


def attend(
    q_THd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    out_THd: torch.Tensor,
    query_start_loc_R1: torch.Tensor,
    seq_lens_R: torch.Tensor,
    block_table_RB: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    host_3: torch.Tensor,
    backend: str,
    scale: float,
    sliding_window: int,
) -> None:
    """Attention into `out_THd` over a cache that holds this step's K and V already."""
    inputs = AttentionInputs(query_start_loc_R1, seq_lens_R, block_table_RB, slot_mapping_T, host_3, backend)
    get_backend(backend).attend(q_THd, kv_cache_N2PKd, out_THd, inputs, scale, sliding_window)


def write_and_attend(
    q_THd: torch.Tensor,
    k_TKd: torch.Tensor,
    v_TKd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    out_THd: torch.Tensor,
    query_start_loc_R1: torch.Tensor,
    seq_lens_R: torch.Tensor,
    block_table_RB: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    host_3: torch.Tensor,
    backend: str,
    scale: float,
    sliding_window: int,
) -> None:
    """What the models' op does."""
    inputs = AttentionInputs(query_start_loc_R1, seq_lens_R, block_table_RB, slot_mapping_T, host_3, backend)
    write_kv(k_TKd, v_TKd, kv_cache_N2PKd, slot_mapping_T, backend)
    get_backend(backend).attend(q_THd, kv_cache_N2PKd, out_THd, inputs, scale, sliding_window)


def _returns_nothing(*args: object) -> None:
    """All that a trace sees of the ops."""


attend_op = torch.library.custom_op("compiled_engine::attend", attend, mutates_args=("out_THd",))
attend_op.register_fake(_returns_nothing)
attention_op = torch.library.custom_op(
    "compiled_engine::attention", write_and_attend, mutates_args=("kv_cache_N2PKd", "out_THd")
)
attention_op.register_fake(_returns_nothing)

# Is given an attention op's function and arguments in place of the call.
OnAttention = Callable[[Callable[..., None], tuple[Any, ...]], None]

# The ops by name, and what the compiled forward calls in their place, without torch's dispatcher.
ATTENTION_OPS: dict[str, Callable[..., None]] = {
    "compiled_engine::attention": write_and_attend,
    "compiled_engine::attend": attend,
}


def attention(
    q_THd: torch.Tensor,
    k_TKd: torch.Tensor,
    v_TKd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    inputs: AttentionInputs,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Causal attention of this step's queries over their requests' whole context.

    Writes k and v into kv_cache at inputs.slot_mapping_T first. A query at position p sees keys at positions
    max(0, p - sliding_window + 1) .. p. Returns [T, H, d] in the dtype of q.
    """
    out_THd = torch.empty_like(q_THd)
    torch.ops.compiled_engine.attention(
        q_THd,
        k_TKd,
        v_TKd,
        kv_cache_N2PKd,
        out_THd,
        inputs.query_start_loc_R1,
        inputs.seq_lens_R,
        inputs.block_table_RB,
        inputs.slot_mapping_T,
        inputs.host_3,
        inputs.backend,
        scale,
        sliding_window or 0,
    )
    return out_THd
