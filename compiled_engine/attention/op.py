"""The one custom op of the models: write K and V to the paged cache, then attend.

It mutates the cache and `out`, so the graph is split around it (see compiled_engine.graphs.split).
"""

from __future__ import annotations

import torch

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.attention.registry import get_backend


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
    """What the op does; the compiled forward calls it directly, without the dispatcher."""
    inputs = AttentionInputs(query_start_loc_R1, seq_lens_R, block_table_RB, slot_mapping_T, host_3, backend)
    implementation = get_backend(backend)
    implementation.write_kv(k_TKd, v_TKd, kv_cache_N2PKd, slot_mapping_T)
    implementation.attend(q_THd, kv_cache_N2PKd, out_THd, inputs, scale, sliding_window)


attention_op = torch.library.custom_op(
    "compiled_engine::attention", write_and_attend, mutates_args=("kv_cache_N2PKd", "out_THd")
)


@attention_op.register_fake
def _(
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
    return None


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


# Ops that the graph is split at, by name, and what the stitched forward calls in their place.
SPLITTING_OPS = {"compiled_engine::attention": write_and_attend}
