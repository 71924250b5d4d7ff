"""Triton kernel for the products in chunks of tokens where each element of a key decays by a number of its own.

decays_by_element.py computes the products with PyTorch's ops, and explains how. They do not depend on the states, so
all chunks are computed at once, before the kernel of delta_rule_triton.py processes the chunks of each request in
order. A chunk is a tile of the step's packed tokens, from a multiple of CHUNK on. It may have tokens of several
requests; products of tokens of different requests are not used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compiled_engine.kernels.launch_arguments import cdiv, next_power_of_2
from compiled_engine.kernels.launcher import quick_launches

CHUNK = 16
# Replaces values of g that are out of range: those of tokens that do not exist may be anything.
_LEAST = tl.constexpr(-1e4)


@triton.jit
def _in_slices(x_Ck: tl.tensor, SLICES: tl.constexpr) -> tl.tensor:
    """Divide the rows of x_Ck [chunk, k] into slices of consecutive elements: [SLICES, chunk, k / SLICES].

    Different warps multiply different slices.
    """
    return tl.permute(tl.reshape(x_Ck, (x_Ck.shape[0], SLICES, x_Ck.shape[1] // SLICES)), (1, 0, 2))


@quick_launches
@triton.jit(do_not_specialize=["num_tokens", "q_stride", "k_stride", "g_stride"])
def element_products_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    g_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    num_tokens: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    g_stride: tl.tensor,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    NORMALISES: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE_K: tl.constexpr,
    SLICES: tl.constexpr,
    PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
) -> None:
    """Write the decayed products of a chunk's keys, and of its queries, with the keys of earlier tokens of the chunk.

    Program: (chunk, head).

    q_ptr, k_ptr: [T, H / GROUP, K]; g_ptr: [T, H, K]. q_stride, k_stride, g_stride: elements from one token to the
        next. num_tokens: T.
    keys_ptr, scores_ptr: fp32 [chunks, H, CHUNK, CHUNK], the products of keys and of queries. Entries for the keys of
        later tokens are zeros. A query, but not a key, is also multiplied by its own token's key.
    SCALE, EPS, NORMALISES, TILE_K, PRECISION: see delta_rule_kernel. SLICES: parts of a key that are multiplied side by
        side. SUMS: input_precision of sums of g, whose factors are 0 and 1.
    """
    tl.static_assert(CHUNK == 16)
    head = tl.program_id(1)
    place_C, k_k = tl.arange(0, CHUNK), tl.arange(0, TILE_K)
    token_C = tl.program_id(0).to(tl.int64) * CHUNK + place_C
    in_Ck = (token_C < num_tokens)[:, None] & (k_k < K)[None, :]
    of_group = (head // GROUP) * K
    q_ptrs_Ck = q_ptr + token_C[:, None] * q_stride + of_group + k_k[None, :]
    k_ptrs_Ck = k_ptr + token_C[:, None] * k_stride + of_group + k_k[None, :]
    g_ptrs_Ck = g_ptr + token_C[:, None] * g_stride + head * K + k_k[None, :]
    q_Ck = tl.load(q_ptrs_Ck, mask=in_Ck, other=0.0).to(tl.float32)
    k_Ck = tl.load(k_ptrs_Ck, mask=in_Ck, other=0.0).to(tl.float32)
    g_Ck = tl.load(g_ptrs_Ck, mask=in_Ck, other=0.0).to(tl.float32)
    g_Ck = tl.where((g_Ck >= _LEAST) & (g_Ck <= 0.0), g_Ck, _LEAST)
    if NORMALISES:
        q_Ck *= tl.rsqrt(tl.sum(q_Ck * q_Ck, 1) + EPS)[:, None]
        k_Ck *= tl.rsqrt(tl.sum(k_Ck * k_Ck, 1) + EPS)[:, None]
    q_Ck *= SCALE
    i_C1, j_1C = place_C[:, None], place_C[None, :]
    keys_CC = tl.zeros([CHUNK, CHUNK], tl.float32)
    scores_CC = tl.where(i_C1 == j_1C, tl.sum(q_Ck * k_Ck, 1)[:, None], 0.0)
    q_SCk, k_SCk, g_SCk = _in_slices(q_Ck, SLICES), _in_slices(k_Ck, SLICES), _in_slices(g_Ck, SLICES)
    for level in tl.static_range(4):  # halves of 1, 2, 4 and 8 tokens
        part_C1, part_1C = i_C1 // (1 << level), j_1C // (1 << level)
        between_CC = (part_C1 == part_1C) & ((part_C1 % 2 == 1) == (j_1C <= i_C1))
        between_SCC = tl.broadcast_to(between_CC.to(tl.float32)[None], (SLICES, CHUNK, CHUNK))
        decay_SCk = tl.exp(tl.dot(between_SCC, g_SCk, input_precision=SUMS))
        is_pair_CC = (part_C1 % 2 == 1) & (part_1C == part_C1 - 1)
        decayed_SCk = k_SCk * decay_SCk
        decayed_SkC = tl.permute(decayed_SCk, (0, 2, 1))
        products_CC = tl.sum(tl.dot(decayed_SCk, decayed_SkC, input_precision=PRECISION), 0)
        keys_CC += tl.where(is_pair_CC, products_CC, 0.0)
        products_CC = tl.sum(tl.dot(q_SCk * decay_SCk, decayed_SkC, input_precision=PRECISION), 0)
        scores_CC += tl.where(is_pair_CC, products_CC, 0.0)
    place_CC = (tl.program_id(0) * H + head).to(tl.int64) * CHUNK * CHUNK + i_C1 * CHUNK + j_1C
    tl.store(keys_ptr + place_CC, keys_CC)
    tl.store(scores_ptr + place_CC, scores_CC)


def element_products(
    q_TGk: torch.Tensor, k_TGk: torch.Tensor, g_THk: torch.Tensor, normalises: bool, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (products of keys, products of queries) in all chunks of a step: keys_ptr and scores_ptr of the kernel.

    g_THk: logarithms of the decays. normalises: divide each query and key by its L2 norm first. eps: added to the
    squared norm.
    """
    num_tokens, num_heads, key_dim = g_THk.shape
    shape = cdiv(num_tokens, CHUNK), num_heads, CHUNK, CHUNK
    keys, scores = (torch.empty(shape, dtype=torch.float32, device=g_THk.device) for _ in range(2))
    tile_k = max(16, next_power_of_2(key_dim))
    in_fp32 = q_TGk.dtype == torch.float32
    element_products_kernel[(shape[0], num_heads)](
        q_TGk,
        k_TGk,
        g_THk,
        keys,
        scores,
        num_tokens,
        q_TGk.stride(0),
        k_TGk.stride(0),
        g_THk.stride(0),
        CHUNK=CHUNK,
        K=key_dim,
        TILE_K=tile_k,
        H=num_heads,
        GROUP=num_heads // q_TGk.shape[1],
        SCALE=key_dim**-0.5,
        NORMALISES=normalises,
        EPS=eps,
        SLICES=min(4, tile_k // 16),
        PRECISION="ieee" if in_fp32 else "tf32",
        SUMS="ieee" if in_fp32 else "tf32x3",
        num_warps=4,
    )
    return keys, scores
