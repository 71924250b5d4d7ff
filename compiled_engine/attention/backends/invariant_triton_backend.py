"""The attention backend of batch-invariant engines on CUDA."""

from __future__ import annotations

import torch

from compiled_engine.attention.backend import AttentionBackend
from compiled_engine.attention.backends.invariant_attention import attend_invariant
from compiled_engine.attention.backends.kernel_choice import num_multiprocessors
from compiled_engine.attention.backends.triton_backend import BACKEND as TRITON
from compiled_engine.attention.backends.wide_tiles import WIDEST_NARROW
from compiled_engine.attention.case import AttentionCase, GraphSupport, Support, require
from compiled_engine.attention.inputs import AttentionInputs, Scoring
from compiled_engine.kernels.launch_arguments import require_dense


class InvariantTritonBackend(AttentionBackend):
    """Attention whose bits for a token depend on its context alone, see invariant_attention. `plan` does nothing."""

    name = "invariant_triton"
    default_block_size = TRITON.default_block_size

    def accept(self, case: AttentionCase) -> Support:
        TRITON.accept(case)
        case.require_paged()
        require(case.head_dim <= WIDEST_NARROW, "head_dim", case.head_dim, f"up to {WIDEST_NARROW}")
        return Support(GraphSupport.ALWAYS)

    def write_kv(
        self,
        k_TKd: torch.Tensor,
        v_TKd: torch.Tensor,
        kv_cache_N2PKd: torch.Tensor,
        slot_mapping_T: torch.Tensor,
        kv_scales_2K: torch.Tensor | None = None,
    ) -> None:
        TRITON.write_kv(k_TKd, v_TKd, kv_cache_N2PKd, slot_mapping_T, kv_scales_2K)

    def attend(
        self,
        q_THd: torch.Tensor,
        kv_cache_N2PKd: torch.Tensor,
        out_THd: torch.Tensor,
        inputs: AttentionInputs,
        scoring: Scoring,
    ) -> None:
        require_dense(kv_cache_N2PKd, q_THd=q_THd, out_THd=out_THd)
        attend_invariant(q_THd, kv_cache_N2PKd, out_THd, inputs, scoring, num_multiprocessors(q_THd.device))


BACKEND: AttentionBackend = InvariantTritonBackend()
