"""Latent attention of a step with Triton kernels: decodes are absorbed, prompts expanded or absorbed.

attention/latents.py describes both ways. For decodes alone, cuBLAS multiplies the weight with queries and results. The
host does not know which prompts are expanded, so a kernel multiplies those of the others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compiled_engine.attention.backends.kernel_arguments import STEP_NUMBERS, STEP_TENSORS
from compiled_engine.attention.backends.triton_expansion import (
    Workspace,
    assign_places,
    attend_expanded,
    expanded_tiles,
)
from compiled_engine.attention.backends.triton_latents import SMALLEST_TILE, Requests, attend_rows, request_of
from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.attention.latents import (
    MOST_EXPANDED_BYTES,
    LatentHeads,
    key_weights,
    queries_of_latents,
    value_weights,
    write_values,
)
from compiled_engine.kernels.launch_arguments import cdiv, is_hopper, next_power_of_2
from compiled_engine.kernels.launcher import quick_launches

# Tokens, elements of results and elements that are added up at a time, of a tile of multiply_kernel.
TILE_M, TILE_C, TILE_K = 64, 64, 32


@quick_launches
@triton.jit(do_not_specialize=STEP_NUMBERS, do_not_specialize_on_alignment=[*STEP_TENSORS, "places_ptr"])
def multiply_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    places_ptr: tl.tensor,
    num_requests: tl.tensor,
    q_token_stride: tl.tensor,
    out_token_stride: tl.tensor,
    X_HEAD_STRIDE: tl.constexpr,
    OUT_HEAD_STRIDE: tl.constexpr,
    WEIGHT_HEAD_STRIDE: tl.constexpr,
    WEIGHT_K_STRIDE: tl.constexpr,
    WEIGHT_C_STRIDE: tl.constexpr,
    NUM_K: tl.constexpr,
    NUM_C: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_C: tl.constexpr,
    TILE_K: tl.constexpr,
) -> None:
    """Multiply heads with their weights. Program (tile, head, columns) multiplies up to TILE_M tokens of a request.

    Requests with a place are left out, see triton_expansion. x_ptr: [T, H, NUM_K]; weight_ptr: [H, NUM_K, NUM_C];
    out_ptr: [T, H, NUM_C]. query_start_loc_ptr: see AttentionInputs. q_token_stride: that of x.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    request = request_of(query_start_loc_ptr, num_requests, tile, 1, TILE_M)
    start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - start
    first = (tile - start // TILE_M - request) * TILE_M
    if (tl.load(places_ptr + request) >= 0) | (first < 0) | (first >= query_len):
        return
    queries_M = first + tl.arange(0, TILE_M)
    tokens_M = (start + queries_M).to(tl.int64)
    mask_M = queries_M < query_len
    c_C = tl.program_id(2) * TILE_C + tl.arange(0, TILE_C)
    k_K = tl.arange(0, TILE_K)
    x_ptr_M = x_ptr + tokens_M * q_token_stride + head * X_HEAD_STRIDE
    weight_ptr_C = weight_ptr + head * WEIGHT_HEAD_STRIDE + c_C * WEIGHT_C_STRIDE
    acc_MC = tl.zeros([TILE_M, TILE_C], tl.float32)
    for k in range(0, NUM_K, TILE_K):
        there_K = k + k_K < NUM_K
        x_ptrs_MK = x_ptr_M[:, None] + k + k_K[None, :]
        x_MK = tl.load(x_ptrs_MK, mask=mask_M[:, None] & there_K[None, :], other=0.0)
        weight_ptrs_KC = weight_ptr_C[None, :] + (k + k_K[:, None]) * WEIGHT_K_STRIDE
        weight_KC = tl.load(weight_ptrs_KC, mask=there_K[:, None] & (c_C[None, :] < NUM_C), other=0.0)
        acc_MC = tl.dot(x_MK, weight_KC, acc_MC, input_precision="ieee")
    out_ptr_M = out_ptr + tokens_M * out_token_stride + head * OUT_HEAD_STRIDE
    mask_MC = mask_M[:, None] & (c_C[None, :] < NUM_C)
    tl.store(out_ptr_M[:, None] + c_C[None, :], acc_MC.to(out_ptr.dtype.element_ty), mask=mask_MC)


def multiply(
    x_THk: torch.Tensor, weight_Hkc: torch.Tensor, out_THc: torch.Tensor, requests: Requests, places_R: torch.Tensor
) -> None:
    """Write to out_THc the product of each head with its weight, for the tokens of requests without a place."""
    num_heads, num_k, num_c = weight_Hkc.shape
    weight_head_stride, weight_k_stride, weight_c_stride = weight_Hkc.stride()
    tile_c = min(TILE_C, max(SMALLEST_TILE, next_power_of_2(num_c)))
    grid = requests.num_tokens // TILE_M + requests.num_requests, num_heads, cdiv(num_c, tile_c)
    multiply_kernel[grid](
        x_THk,
        weight_Hkc,
        out_THc,
        requests.query_start_loc_R1,
        places_R,
        requests.num_requests,
        x_THk.stride(0),
        out_THc.stride(0),
        X_HEAD_STRIDE=x_THk.stride(1),
        OUT_HEAD_STRIDE=out_THc.stride(1),
        WEIGHT_HEAD_STRIDE=weight_head_stride,
        WEIGHT_K_STRIDE=weight_k_stride,
        WEIGHT_C_STRIDE=weight_c_stride,
        NUM_K=num_k,
        NUM_C=num_c,
        TILE_M=TILE_M,
        TILE_C=tile_c,
        TILE_K=TILE_K,
        num_warps=4,
        num_stages=2,
        enable_fp_fusion=True,
    )


def attend_latents(
    q_THd: torch.Tensor,
    weight_Cr: torch.Tensor,
    cache_N1P1w: torch.Tensor,
    out_THv: torch.Tensor,
    inputs: AttentionInputs,
    scale: float,
    most_bytes: int = MOST_EXPANDED_BYTES,
) -> None:
    """Write causal attention over latent rows to `out_THv`; see `op.latent_attention`.

    most_bytes: memory for expanded keys and values. The launches depend on shapes and the facts of the host alone. The
    inputs must not have keys_ahead_T.
    """
    assert inputs.keys_ahead_T is None
    num_tokens, num_requests, num_decodes, _, max_seq_len = inputs.sizes
    heads = LatentHeads.of_cache(q_THd, weight_Cr, cache_N1P1w)
    requests = Requests.of(inputs, num_tokens, max_seq_len)
    num_prompts = num_requests - num_decodes
    workspace, tiles = None, None
    if num_prompts:
        tiles = expanded_tiles(heads, q_THd.element_size(), hopper=is_hopper(q_THd.device))
        of_prompts = num_tokens - num_decodes, num_prompts, max_seq_len
        workspace = Workspace.of(heads, q_THd.element_size(), tiles.rows, *of_prompts, most_bytes)
    if workspace is None or tiles is None:
        _attend_absorbed(q_THd, weight_Cr, cache_N1P1w, out_THv, requests, heads, scale)
        return
    if num_decodes:
        decodes = requests.first(num_decodes)
        _attend_absorbed(q_THd[:num_decodes], weight_Cr, cache_N1P1w, out_THv[:num_decodes], decodes, heads, scale)
    prompts = requests.after(num_decodes)
    places = assign_places(prompts, workspace, heads, tiles)
    latents_THr = q_THd.new_empty(num_tokens, heads.num_heads, heads.latent)
    multiply(q_THd[..., : heads.own], key_weights(weight_Cr, heads), latents_THr, prompts, places.places_R)
    attend_rows(latents_THr, q_THd[..., heads.own :], cache_N1P1w, prompts, scale, places.places_R)
    to_values_Hrv = value_weights(weight_Cr, heads).transpose(1, 2)
    multiply(latents_THr, to_values_Hrv, out_THv, prompts, places.places_R)
    del latents_THr  # its memory serves the workspace
    attend_expanded(q_THd, weight_Cr, cache_N1P1w, out_THv, prompts, places, workspace, heads, tiles, scale)


def _attend_absorbed(
    q_THd: torch.Tensor,
    weight_Cr: torch.Tensor,
    cache_N1P1w: torch.Tensor,
    out_THv: torch.Tensor,
    requests: Requests,
    heads: LatentHeads,
    scale: float,
) -> None:
    latents_THr = queries_of_latents(q_THd, weight_Cr, heads)
    attend_rows(latents_THr, q_THd[..., heads.own :], cache_N1P1w, requests, scale)
    write_values(latents_THr, weight_Cr, heads, out_THv)
