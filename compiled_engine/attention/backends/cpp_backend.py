"""Attention in C++, the default on a CPU with a C++ compiler.

One kernel computes decodes; another norms and rotates q and k in float32, and writes k and v. Prompts are computed in
plain torch.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from compiled_engine.attention.backend import AttentionBackend
from compiled_engine.attention.backends.torch_backend import prefill_each
from compiled_engine.attention.case import AttentionCase, GraphSupport, Refused, Support, names_of, require
from compiled_engine.attention.inputs import AttentionInputs, Rotation, Scoring
from compiled_engine.kernels.cpp_library import INTEGER, NUMBER, POINTER, CannotCompile, CppFunction
from compiled_engine.kernels.launch_arguments import require_dense
from compiled_engine.kv_format import is_coded

ATTENTION = Path(__file__).with_name("cpp_attention.cpp")
CODE_ATTENTION = Path(__file__).with_name("cpp_code_attention.cpp")
ROTATION = Path(__file__).with_name("cpp_rotation.cpp")
DTYPES = (torch.float32, torch.bfloat16)
# Head sizes that the kernel is compiled for.
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 192, 256)
DECODE_TYPES = (*[POINTER] * 5, *[INTEGER] * 10, NUMBER, INTEGER, NUMBER, POINTER)
# See cpp_kv_codes.h.
PLAIN = 0
FORMATS = {torch.uint8: 1, torch.float8_e4m3fn: 2}


class CppBackend(AttentionBackend):
    """Attention in C++, see the module. One call per layer computes all decodes, which read the cache in place."""

    name = "cpp"
    default_block_size = 16

    def accept(self, case: AttentionCase) -> Support:
        require(case.device == "cpu", "device", case.device, "cpu")
        cache = case.require_paged()
        require(case.dtype in DTYPES, "dtype", case.dtype, names_of(DTYPES))
        require(case.head_dim in HEAD_DIMS, "head_dim", case.head_dim, names_of(HEAD_DIMS))
        try:
            (_decode_codes if is_coded(cache.dtype) else _decode)()
        except CannotCompile as error:
            raise Refused(str(error)) from error
        return Support(GraphSupport.NEVER, records_decodes=True)

    def write_kv(
        self,
        k_TKd: torch.Tensor,
        v_TKd: torch.Tensor,
        kv_cache_N2PKd: torch.Tensor,
        slot_mapping_T: torch.Tensor,
        kv_scales_2K: torch.Tensor | None = None,
    ) -> None:
        coded = is_coded(kv_cache_N2PKd.dtype)
        if coded:
            k_TKd, v_TKd = k_TKd.float(), v_TKd.float()
        size, (num_tokens, num_kv_heads, head_dim) = k_TKd.element_size(), k_TKd.shape
        if k_TKd.stride(1) != head_dim or v_TKd.stride(1) != head_dim:
            k_TKd, v_TKd = k_TKd.contiguous(), v_TKd.contiguous()
        require_dense(kv_cache_N2PKd, k_TKd=k_TKd, v_TKd=v_TKd)
        if coded:
            _write_kv_codes()(
                k_TKd.data_ptr(),
                v_TKd.data_ptr(),
                kv_cache_N2PKd.data_ptr(),
                slot_mapping_T.data_ptr(),
                num_tokens,
                k_TKd.stride(0),
                v_TKd.stride(0),
                num_kv_heads,
                head_dim,
                kv_cache_N2PKd.shape[2],
                _address(kv_scales_2K),
                FORMATS[kv_cache_N2PKd.dtype],
            )
            return
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
        if scoring.sinks_H is not None:
            scoring = scoring._replace(sinks_H=scoring.sinks_H.float().contiguous())
        if num_decodes and not is_coded(kv_cache_N2PKd.dtype):
            scoring_arguments = _arguments(q_THd, kv_cache_N2PKd, out_THd, inputs, num_decodes, scoring)
            _decode()(*scoring_arguments, q_THd.element_size(), torch.get_num_threads())
        elif num_decodes:
            q_RHd, out_RHd = q_THd[:num_decodes].float(), out_THd[:num_decodes].float()
            scoring_arguments = _arguments(q_RHd, kv_cache_N2PKd, out_RHd, inputs, num_decodes, scoring)
            scales, format = _address(scoring.kv_scales_2K), FORMATS[kv_cache_N2PKd.dtype]
            _decode_codes()(*scoring_arguments, torch.get_num_threads(), scales, format)
            if out_THd.dtype is not torch.float32:
                out_THd[:num_decodes] = out_RHd
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
        slot_mapping_T, kv_scales_2K = inputs.slot_mapping_T, scoring.kv_scales_2K
        rotated_THd = rotate_and_write(q_THd, k_TKd, v_TKd, rotation, kv_cache_N2PKd, slot_mapping_T, kv_scales_2K)
        if rotated_THd is None:
            return False
        self.attend(rotated_THd, kv_cache_N2PKd, out_THd, inputs, scoring)
        return True


def _arguments(
    q_RHd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    out_RHd: torch.Tensor,
    inputs: AttentionInputs,
    num_decodes: int,
    scoring: Scoring,
) -> tuple[Any, ...]:
    """Return the first arguments of the C++ functions decode and decode_codes. Sinks must be fp32 and contiguous."""
    block_size, num_kv_heads = kv_cache_N2PKd.shape[2:4]
    return (
        q_RHd.data_ptr(),
        kv_cache_N2PKd.data_ptr(),
        out_RHd.data_ptr(),
        inputs.seq_lens_R.data_ptr(),
        inputs.block_table_RB.data_ptr(),
        inputs.block_table_RB.stride(0),
        *q_RHd.stride()[:2],
        *out_RHd.stride()[:2],
        num_decodes,
        num_kv_heads,
        q_RHd.shape[1] // num_kv_heads,
        q_RHd.shape[2],
        block_size,
        scoring.scale,
        scoring.sliding_window,
        scoring.soft_cap,
        _address(scoring.sinks_H),
    )


def rotate_and_write(
    q_THd: torch.Tensor,
    k_TKd: torch.Tensor,
    v_TKd: torch.Tensor,
    rotation: Rotation,
    kv_cache_N2PKd: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    kv_scales_2K: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Norm and rotate q and k, store k and v, and return the rotated q, contiguous [T, H, d].

    Returns None, with nothing done, unless all operands are float32 (the cache may have 8 bits) and d is at most 256.
    The elements of a head must be consecutive, and so must those of a token's cos and sin; raises ValueError otherwise.
    Raises CannotCompile without a working C++ compiler.
    """
    weights = rotation.q_norm_weight_d, rotation.k_norm_weight_d
    angles = {"cos_T1d": rotation.cos_T1d, "sin_T1d": rotation.sin_T1d}
    floats = q_THd, k_TKd, v_TKd, *angles.values(), *weights
    if kv_cache_N2PKd.dtype not in (torch.float32, *FORMATS) or q_THd.shape[-1] > HEAD_DIMS[-1]:
        return None
    if any(tensor is not None and tensor.dtype is not torch.float32 for tensor in floats):
        return None
    require_dense(kv_cache_N2PKd, q_THd=q_THd, k_TKd=k_TKd, v_TKd=v_TKd, **angles)
    (num_tokens, num_heads, head_dim), (num_kv_heads, _) = q_THd.shape, k_TKd.shape[1:]
    rotated_THd = q_THd.new_empty((num_tokens, num_heads, head_dim))
    _rotate_and_write()(
        q_THd.data_ptr(),
        k_TKd.data_ptr(),
        v_TKd.data_ptr(),
        *map(_address, weights),
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
        _address(kv_scales_2K),
        FORMATS.get(kv_cache_N2PKd.dtype, PLAIN),
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


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@cache
def _decode() -> CppFunction:
    return CppFunction(ATTENTION, "decode", [*DECODE_TYPES, *[INTEGER] * 2])


@cache
def _decode_codes() -> CppFunction:
    return CppFunction(CODE_ATTENTION, "decode_codes", [*DECODE_TYPES, INTEGER, POINTER, INTEGER])


@cache
def _write_kv() -> CppFunction:
    return CppFunction(ATTENTION, "write_kv", [*[POINTER] * 4, *[INTEGER] * 5])


@cache
def _write_kv_codes() -> CppFunction:
    types = [*[POINTER] * 4, *[INTEGER] * 6, POINTER, INTEGER]
    return CppFunction(CODE_ATTENTION, "write_kv_codes", types)


@cache
def _rotate_and_write() -> CppFunction:
    tail = [*[POINTER] * 2, INTEGER, *[POINTER] * 2, *[INTEGER] * 12]
    types = [*[POINTER] * 5, *[NUMBER] * 2, *[POINTER] * 2, *[INTEGER] * 6, *tail]
    return CppFunction(ROTATION, "rotate_and_write", types)


BACKEND: AttentionBackend = CppBackend()
