"""Norm, rotation and the write of K and V on a CPU as one call of C++, for float32."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from compiled_engine.attention.inputs import Rotation
from compiled_engine.kernels.cpp_function import INTEGER, NUMBER, POINTER, CppFunction
from compiled_engine.kernels.dense_tensors import require_dense

SOURCE = Path(__file__).with_name("cpp_rotation.cpp")


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
    _kernel()(
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
def _kernel() -> CppFunction:
    types = [*[POINTER] * 5, *[NUMBER] * 2, *[POINTER] * 2, *[INTEGER] * 6, *[POINTER] * 3, *[INTEGER] * 12]
    return CppFunction(SOURCE, "rotate_and_write", types)
