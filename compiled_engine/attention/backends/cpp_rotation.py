"""Norm, rotation and the write of K and V on a CPU as one call of C++, for float32."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

from compiled_engine.attention.inputs import Rotation
from compiled_engine.kernels.cpp_library import load_library

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

    The elements of a head are consecutive, and so are those of cos and sin of a token. Raises CannotCompile.
    """
    weights = rotation.q_norm_weight_d, rotation.k_norm_weight_d
    floats = q_THd, rotation.cos_T1d, kv_cache_N2PKd, *weights
    if any(tensor is not None and tensor.dtype is not torch.float32 for tensor in floats):
        return None
    (num_tokens, num_heads, head_dim), (num_kv_heads, _) = q_THd.shape, k_TKd.shape[1:]
    rotated_THd = torch.empty((num_tokens, num_heads, head_dim))
    too_large = _kernel()(
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
    return None if too_large else rotated_THd


@cache
def _kernel() -> Any:
    kernel = load_library(SOURCE).rotate_and_write
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    kernel.argtypes = [
        *[pointer] * 5,
        *[ctypes.c_float] * 2,
        *[pointer] * 2,
        *[integer] * 5,
        *[pointer] * 3,
        *[integer] * 12,
    ]
    return kernel
