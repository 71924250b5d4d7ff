"""Attention with the package flash-attn: version 3 (flash_attn_interface, for Hopper only) if installed, otherwise 2.

See Dao 2023 (FlashAttention-2) and Shah et al. 2024 (FlashAttention-3). The engine's own kernel writes K and V.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch.nn.functional import pad

from compiled_engine.attention.backend import AttentionBackend
from compiled_engine.attention.backends.torch_backend import BACKEND as REFERENCE
from compiled_engine.attention.backends.triton_write_kv import write_kv
from compiled_engine.attention.case import AttentionCase, GraphSupport, Refused, Support, names_of, require
from compiled_engine.attention.inputs import AttentionInputs, Scoring

HAS_VERSION_3 = find_spec("flash_attn_interface") is not None
if HAS_VERSION_3:
    import flash_attn_interface
else:
    import flash_attn

# Version 2 demands pages of a multiple of 256 tokens; version 3 takes any.
PAGE_MULTIPLE = 1 if HAS_VERSION_3 else 256
MIN_CAPABILITY = (9, 0) if HAS_VERSION_3 else (8, 0)
MAX_HEAD_DIM = 256
DTYPES = (torch.bfloat16, torch.float16)


class FlashAttnBackend(AttentionBackend):
    """Attention with flash-attn, see the module. For a row with seq_len 0 the kernels write zeros and read no key."""

    name = "flash_attn"
    default_block_size = 256

    def accept(self, case: AttentionCase) -> Support:
        require(case.device == "cuda", "device", case.device, "cuda")
        capability = torch.cuda.get_device_capability()
        from_on = f"from {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} on"
        require(capability >= MIN_CAPABILITY, "compute capability", f"{capability[0]}.{capability[1]}", from_on)
        cache = case.require_paged()
        require(case.dtype in DTYPES, "dtype", case.dtype, names_of(DTYPES))
        head_dims = f"multiples of 8 up to {MAX_HEAD_DIM}"
        require(case.head_dim <= MAX_HEAD_DIM and case.head_dim % 8 == 0, "head_dim", case.head_dim, head_dims)
        require(not case.sinks, "sinks", case.sinks, "False, since flash-attn has none")
        allowed = f"{case.dtype}, since flash-attn reads no codes with scales of tokens, and multiplies FP8 in FP8"
        require(cache.dtype == case.dtype, "kv_cache_dtype", cache.dtype, allowed)
        pages = f"multiples of {PAGE_MULTIPLE}"
        require(cache.block_size % PAGE_MULTIPLE == 0, "block_size", cache.block_size, pages)
        defect = _defect_of_build(case.dtype, case.head_dim, case.soft_cap)
        if defect:
            raise Refused(defect)
        return Support(GraphSupport.UNIFORM_DECODE)

    def write_kv(
        self,
        k_TKd: torch.Tensor,
        v_TKd: torch.Tensor,
        kv_cache_N2PKd: torch.Tensor,
        slot_mapping_T: torch.Tensor,
        kv_scales_2K: torch.Tensor | None = None,
    ) -> None:
        write_kv(k_TKd, v_TKd, kv_cache_N2PKd, slot_mapping_T, kv_scales_2K, dependent_launch=False)

    def attend(
        self,
        q_THd: torch.Tensor,
        kv_cache_N2PKd: torch.Tensor,
        out_THd: torch.Tensor,
        inputs: AttentionInputs,
        scoring: Scoring,
    ) -> None:
        k_NPKd, v_NPKd = kv_cache_N2PKd.unbind(1)
        window = (scoring.sliding_window - 1, 0) if scoring.sliding_window else (-1, -1)
        num_decodes, max_query_len, max_seq_len = inputs.host_3.tolist()
        if HAS_VERSION_3:
            result_THd = flash_attn_interface.flash_attn_with_kvcache(
                q_THd,
                k_NPKd,
                v_NPKd,
                cache_seqlens=inputs.seq_lens_R,
                page_table=inputs.block_table_RB,
                cu_seqlens_q=inputs.query_start_loc_R1,
                max_seqlen_q=max_query_len,
                softmax_scale=scoring.scale,
                causal=True,
                window_size=window,
                softcap=scoring.soft_cap,
            )
            out_THd.copy_(result_THd)
            return
        if num_decodes:
            result_R1Hd = flash_attn.flash_attn_with_kvcache(
                q_THd[:num_decodes].unsqueeze(1),
                k_NPKd,
                v_NPKd,
                cache_seqlens=inputs.seq_lens_R[:num_decodes],
                block_table=inputs.block_table_RB[:num_decodes],
                softmax_scale=scoring.scale,
                causal=True,
                window_size=window,
                softcap=scoring.soft_cap,
            )
            out_THd[:num_decodes].copy_(result_R1Hd.squeeze(1))
        if num_decodes < inputs.seq_lens_R.shape[0]:
            # The starts count from the batch's first token, so all queries go in; the decodes are not computed.
            # At 1 the package would take every row to hold exactly one query, which a padding row need not.
            result_THd = flash_attn.flash_attn_varlen_func(
                q_THd,
                k_NPKd,
                v_NPKd,
                cu_seqlens_q=inputs.query_start_loc_R1[num_decodes:],
                cu_seqlens_k=pad(inputs.seq_lens_R[num_decodes:].cumsum(0, dtype=torch.int32), (1, 0)),
                max_seqlen_q=max(2, max_query_len),
                max_seqlen_k=max_seq_len,
                softmax_scale=scoring.scale,
                causal=True,
                window_size=window,
                softcap=scoring.soft_cap,
                block_table=inputs.block_table_RB[num_decodes:],
            )
            out_THd[num_decodes:].copy_(result_THd[num_decodes:])


@cache
def _defect_of_build(dtype: torch.dtype, head_dim: int, soft_cap: float) -> str | None:
    """Return the defect of the installed build for this case, found by a trial decode and prefill; None without one.

    Builds may leave out dtypes and head sizes, even silently.
    """
    block_size, num_queries = FlashAttnBackend.default_block_size, 70
    cache_N2PKd = torch.arange(6 * 2 * block_size * head_dim, device="cuda").sin().to(dtype)
    cache_N2PKd = cache_N2PKd.view(6, 2, block_size, 1, head_dim)
    q_THd = torch.arange(num_queries * 2 * head_dim, device="cuda").cos().to(dtype).view(num_queries, 2, head_dim)
    inputs = AttentionInputs(
        query_start_loc_R1=torch.tensor([0, 1, num_queries], dtype=torch.int32, device="cuda"),
        seq_lens_R=torch.tensor([700, 300], dtype=torch.int32, device="cuda"),
        block_table_RB=torch.tensor([[1, 5, 0], [4, 2, 3]], dtype=torch.int32, device="cuda"),
        slot_mapping_T=torch.full((num_queries,), -1, device="cuda"),
        host_3=torch.tensor([1, num_queries - 1, 700], dtype=torch.int32),
        backend="flash_attn",
    )
    expected_THd, out_THd = torch.empty_like(q_THd), torch.full_like(q_THd, float("nan"))
    scoring = Scoring(head_dim**-0.5, soft_cap=soft_cap)
    tried = f"dtype {dtype} with head_dim {head_dim}" + (f" and soft_cap {soft_cap}" if soft_cap else "")
    REFERENCE.attend(q_THd, cache_N2PKd, expected_THd, inputs, scoring)
    try:
        BACKEND.attend(q_THd, cache_N2PKd, out_THd, inputs, scoring)
    except RuntimeError as error:
        return f"this build of flash-attn refuses {tried}: {error}"
    if not torch.allclose(out_THd, expected_THd, atol=0.02, rtol=0.02):
        return f"this build of flash-attn computes {tried} wrongly"
    return None


BACKEND: AttentionBackend = FlashAttnBackend()
