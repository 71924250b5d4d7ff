"""Attention on a CPU by a C++ kernel for decodes; prompts go to plain torch. The default where a C++ compiler is."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from compiled_engine.attention.backend import AttentionBackend, AttentionCase, GraphSupport
from compiled_engine.attention.backends.cpp_rotation import rotate_and_write
from compiled_engine.attention.backends.torch_backend import prefill_each
from compiled_engine.attention.inputs import AttentionInputs, Rotation, Scoring
from compiled_engine.kernels.cpp_function import INTEGER, NUMBER, POINTER, CppFunction
from compiled_engine.kernels.cpp_library import CannotCompile
from compiled_engine.kernels.dense_tensors import require_dense

SOURCE = Path(__file__).with_name("cpp_attention.cpp")
DTYPES = (torch.float32, torch.bfloat16)
# Those that the kernel is compiled for.
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 192, 256)


class CppBackend(AttentionBackend):
    """See the module's docstring. It reads the cache in place, and one call does a layer's decodes."""

    name = "cpp"
    graph_support = GraphSupport.NEVER
    records_decodes = True
    default_block_size = 16

    def unsupported(self, case: AttentionCase) -> str | None:
        if case.device_type != "cpu":
            return f"device is {case.device_type}; allowed: cpu"
        if case.dtype not in DTYPES:
            return f"dtype is {case.dtype}; allowed: {', '.join(str(dtype) for dtype in DTYPES)}"
        if case.head_dim not in HEAD_DIMS:
            return f"head_dim is {case.head_dim}; allowed: {', '.join(map(str, HEAD_DIMS))}"
        if case.num_heads % case.num_kv_heads:
            return f"num_heads is {case.num_heads}; allowed: multiples of num_kv_heads {case.num_kv_heads}"
        try:
            _decode()
        except CannotCompile as error:
            return str(error)
        return None

    def work_length(self, num_tokens: int, num_requests: int, case: AttentionCase) -> int:
        return 0

    def plan(self, inputs: AttentionInputs, case: AttentionCase) -> None:
        pass

    def write_kv(
        self,
        k_TKd: torch.Tensor,
        v_TKd: torch.Tensor,
        kv_cache_N2PKd: torch.Tensor,
        slot_mapping_T: torch.Tensor,
    ) -> None:
        size, (num_tokens, num_kv_heads, head_dim) = k_TKd.element_size(), k_TKd.shape
        if k_TKd.stride(1) != head_dim or v_TKd.stride(1) != head_dim:
            k_TKd, v_TKd = k_TKd.contiguous(), v_TKd.contiguous()
        require_dense(kv_cache_N2PKd, k_TKd=k_TKd, v_TKd=v_TKd)
        _write_kv()(
            k_TKd.data_ptr(),
            v_TKd.data_ptr(),
            kv_cache_N2PKd.data_ptr(),
            slot_mapping_T.data_ptr(),
            num_tokens,
            k_TKd.stride(0) * size,
            v_TKd.stride(0) * size,
            num_kv_heads * head_dim * size,
            kv_cache_N2PKd.shape[2],
        )

    def attend(
        self,
        q_THd: torch.Tensor,
        kv_cache_N2PKd: torch.Tensor,
        out_THd: torch.Tensor,
        inputs: AttentionInputs,
        scoring: Scoring,
    ) -> None:
        require_dense(kv_cache_N2PKd, q_THd=q_THd, out_THd=out_THd)
        num_decodes = int(inputs.host_3[0])
        if num_decodes:
            sinks_H = None if scoring.sinks_H is None else scoring.sinks_H.float().contiguous()
            block_size, num_kv_heads, head_dim = kv_cache_N2PKd.shape[2:]
            q_token_stride, q_head_stride, _ = q_THd.stride()
            out_token_stride, out_head_stride, _ = out_THd.stride()
            _decode()(
                q_THd.data_ptr(),
                kv_cache_N2PKd.data_ptr(),
                out_THd.data_ptr(),
                inputs.seq_lens_R.data_ptr(),
                inputs.block_table_RB.data_ptr(),
                inputs.block_table_RB.stride(0),
                q_token_stride,
                q_head_stride,
                out_token_stride,
                out_head_stride,
                num_decodes,
                num_kv_heads,
                q_THd.shape[1] // num_kv_heads,
                head_dim,
                block_size,
                scoring.scale,
                scoring.sliding_window,
                scoring.soft_cap,
                None if sinks_H is None else sinks_H.data_ptr(),
                kv_cache_N2PKd.element_size(),
                torch.get_num_threads(),
            )
        prefill_each(q_THd, kv_cache_N2PKd, out_THd, inputs, num_decodes, scoring)

    def attend_unrotated(
        self,
        q_THd: torch.Tensor,
        k_TKd: torch.Tensor,
        v_TKd: torch.Tensor,
        rotation: Rotation,
        kv_cache_N2PKd: torch.Tensor,
        out_THd: torch.Tensor,
        inputs: AttentionInputs,
        scoring: Scoring,
    ) -> bool:
        rotated_THd = rotate_and_write(q_THd, k_TKd, v_TKd, rotation, kv_cache_N2PKd, inputs.slot_mapping_T)
        if rotated_THd is None:
            return False
        self.attend(rotated_THd, kv_cache_N2PKd, out_THd, inputs, scoring)
        return True


@cache
def _decode() -> CppFunction:
    types = [*[POINTER] * 5, *[INTEGER] * 10, NUMBER, INTEGER, NUMBER, POINTER, *[INTEGER] * 2]
    return CppFunction(SOURCE, "decode", types)


@cache
def _write_kv() -> CppFunction:
    return CppFunction(SOURCE, "write_kv", [*[POINTER] * 4, *[INTEGER] * 5])


BACKEND: AttentionBackend = CppBackend()
