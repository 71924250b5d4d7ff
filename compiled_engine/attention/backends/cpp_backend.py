"""Attention on a CPU in C++: a kernel for decodes, and for float32 a kernel that norms, rotates and writes K and V.

Attention of prompts is plain torch. The default on a CPU with a C++ compiler.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from compiled_engine.attention.backend import AttentionBackend
from compiled_engine.attention.backends.torch_backend import prefill_each
from compiled_engine.attention.case import AttentionCase, GraphSupport, Refused, Support, names_of, require
from compiled_engine.attention.inputs import AttentionInputs, Rotation, Scoring
from compiled_engine.kernels.cpp_library import INTEGER, NUMBER, POINTER, CannotCompile, CppFunction
from compiled_engine.kernels.launch_arguments import require_dense

ATTENTION = Path(__file__).with_name("cpp_attention.cpp")
ROTATION = Path(__file__).with_name("cpp_rotation.cpp")
DTYPES = (torch.float32, torch.bfloat16)
# Head sizes that the kernel is compiled for.
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 192, 256)


class CppBackend(AttentionBackend):
    """See the module's docstring. It reads the cache in place, and one call does a layer's decodes."""

    name = "cpp"
    default_block_size = 16

    def accept(self, case: AttentionCase) -> Support:
        require(case.device == "cpu", "device", case.device, "cpu")
        case.require_paged()
        require(case.dtype in DTYPES, "dtype", case.dtype, names_of(DTYPES))
        require(case.head_dim in HEAD_DIMS, "head_dim", case.head_dim, names_of(HEAD_DIMS))
        try:
            _decode()
        except CannotCompile as error:
            raise Refused(str(error)) from error
        return Support(GraphSupport.NEVER, records_decodes=True)

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


def rotate_and_write(
    q_THd: torch.Tensor,
    k_TKd: torch.Tensor,
    v_TKd: torch.Tensor,
    rotation: Rotation,
    kv_cache_N2PKd: torch.Tensor,
    slot_mapping_T: torch.Tensor,
) -> torch.Tensor | None:
    """Store K and V, and return q [T, H, d] normed and rotated, contiguous; None, with nothing done, for other dtypes.

    d is at most 256. The elements of a head are consecutive, and so are those of cos and sin of a token. Raises
    CannotCompile, ValueError for other layouts.
    """
    weights = rotation.q_norm_weight_d, rotation.k_norm_weight_d
    angles = {"cos_T1d": rotation.cos_T1d, "sin_T1d": rotation.sin_T1d}
    floats = q_THd, k_TKd, v_TKd, *angles.values(), kv_cache_N2PKd, *weights
    if any(tensor is not None and tensor.dtype is not torch.float32 for tensor in floats):
        return None
    require_dense(kv_cache_N2PKd, q_THd=q_THd, k_TKd=k_TKd, v_TKd=v_TKd, **angles)
    (num_tokens, num_heads, head_dim), (num_kv_heads, _) = q_THd.shape, k_TKd.shape[1:]
    rotated_THd = q_THd.new_empty((num_tokens, num_heads, head_dim))
    _rotate_and_write()(
        q_THd.data_ptr(),
        k_TKd.data_ptr(),
        v_TKd.data_ptr(),
        *(None if weight is None else weight.data_ptr() for weight in weights),
        rotation.eps,
        rotation.norm_offset,
        rotation.cos_T1d.data_ptr(),
        rotation.sin_T1d.data_ptr(),
        rotation.cos_T1d.stride(0),
        rotation.sin_T1d.stride(0),
        rotation.cos_T1d.shape[-1],
        rotation.rotary_dim or head_dim,
        rotation.interleaved,
        rotation.norm_last,
        kv_cache_N2PKd.data_ptr(),
        slot_mapping_T.data_ptr(),
        rotated_THd.data_ptr(),
        num_tokens,
        num_heads,
        num_kv_heads,
        head_dim,
        kv_cache_N2PKd.shape[2],
        *q_THd.stride()[:2],
        *k_TKd.stride()[:2],
        *v_TKd.stride()[:2],
        torch.get_num_threads(),
    )
    return rotated_THd


@cache
def _decode() -> CppFunction:
    types = [*[POINTER] * 5, *[INTEGER] * 10, NUMBER, INTEGER, NUMBER, POINTER, *[INTEGER] * 2]
    return CppFunction(ATTENTION, "decode", types)


@cache
def _write_kv() -> CppFunction:
    return CppFunction(ATTENTION, "write_kv", [*[POINTER] * 4, *[INTEGER] * 5])


@cache
def _rotate_and_write() -> CppFunction:
    types = [*[POINTER] * 5, *[NUMBER] * 2, *[POINTER] * 2, *[INTEGER] * 6, *[POINTER] * 3, *[INTEGER] * 12]
    return CppFunction(ROTATION, "rotate_and_write", types)


BACKEND: AttentionBackend = CppBackend()
