"""Triton kernels for expanded latent attention: keys and values of contexts are computed, then prompts attend to them.

attention/latents.py says when a request is expanded. A workspace holds the keys and values of the expanded requests of
a step, for a few heads at a time. A request begins at a tile of TILE_L rows, its place. Requests that do not fit into
the workspace have no place, and are computed as those are for which expanding does not pay (triton_latents.py).

The device chooses, so launches depend on shapes and on the host's bound of the contexts alone.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from compiled_engine.attention.backends.kernel_arguments import STEP_NUMBERS, STEP_TENSORS
from compiled_engine.attention.backends.triton_latent_rows import (
    LatentCache,
    latent_scale_ptrs,
    rotated_numbers,
    row_ptrs,
    words_of,
)
from compiled_engine.attention.backends.triton_latents import SMALLEST_TILE, Requests, request_of
from compiled_engine.attention.backends.triton_tile import (
    LOG2_E,
    LOWEST,
    add_values,
    blocks_of,
    head_elements,
    head_masks,
    load_parts,
    load_queries,
    no_sums,
    normalised_parts,
    rescaled,
    scores_of,
    store_parts,
    tail_of,
    weigh,
)
from compiled_engine.attention.backends.work_list import SEARCH_WIDTH
from compiled_engine.attention.latents import LatentHeads
from compiled_engine.attention.triton_codes import bfloat16_values, numbers
from compiled_engine.kernels.launch_arguments import cdiv, next_power_of_2
from compiled_engine.kernels.launcher import quick_launches

# Longest head of keys and of values for which a program has registers.
LONGEST_HEAD = 256
# In steps with fewer tokens of prompts, the launches take longer than expanding saves.
FEWEST_TOKENS = 256
# Tokens of contexts that are expanded for each token of prompts, if the longest context is not longer.
MOST_CONTEXT_PER_TOKEN = 16
NUMBERS = [*STEP_NUMBERS, "capacity", "first_head", "row_stride"]
TENSORS = [*STEP_TENSORS, "places_ptr", "tiles_ptr", "num_tiles_ptr"]


class ExpandedTiles(NamedTuple):
    """Sizes of the tiles of both kernels, and the options with which they are launched."""

    rows: int  # of the workspace that a program expands
    columns: int  # elements of the weight's rows that it computes
    chunk: int  # elements of latents that it multiplies at a time
    expand_warps: int
    expand_stages: int
    queries: int
    keys: int
    num_warps: int
    num_stages: int


def expanded_tiles(heads: LatentHeads, element_size: int, *, hopper: bool) -> ExpandedTiles:
    """Return tiles for which registers and shared memory suffice: those of Hopper, or of every supported GPU.

    element_size: of queries, in bytes. With 16 bits on Hopper, queries of 256 elements take 64 KiB of shared memory,
    and two stages of keys and values 128 KiB.
    """
    if element_size == 4:
        return ExpandedTiles(32, 32, 32, 4, 2, 32, 16, 8, 2)
    if hopper:
        return ExpandedTiles(128, 128, 64, 8, 3, 128, 64, 8, 2)
    if max(heads.key, heads.value) > 128:
        return ExpandedTiles(64, 64, 64, 4, 2, 64, 32, 4, 2)
    return ExpandedTiles(64, 64, 64, 4, 2, 64, 32, 4, 3)


class Workspace(NamedTuple):
    """The size of a step's workspace, [capacity * rows, heads * (key + value)] in the dtype of queries."""

    capacity: int  # tiles of rows
    heads: int  # for which it holds keys and values at a time
    nbytes: int

    @classmethod
    def of(
        cls,
        heads: LatentHeads,
        element_size: int,
        rows: int,
        num_tokens: int,
        num_requests: int,
        max_seq_len: int,
        most_bytes: int,
    ) -> Workspace | None:
        """Return the workspace of a step with prompts; None for steps that expand nothing.

        element_size: of queries, in bytes. rows: of a tile. num_tokens, num_requests: those of prompts. max_seq_len:
        the host's bound of their contexts. No step of fewer tokens, requests or shorter contexts takes more memory.
        most_bytes: at least the bytes of one tile of one head.
        """
        fits = heads.key <= LONGEST_HEAD and heads.value <= LONGEST_HEAD
        if num_tokens < FEWEST_TOKENS or not fits or heads.crossover == float("inf"):
            return None
        longest = cdiv(max_seq_len, rows)
        usual = cdiv(MOST_CONTEXT_PER_TOKEN * num_tokens, rows)
        tile_bytes = rows * (heads.key + heads.value) * element_size  # of one head
        capacity = min(num_requests * longest, max(longest, usual), most_bytes // tile_bytes)
        passes = cdiv(heads.num_heads, most_bytes // (capacity * tile_bytes))
        nbytes = min(heads.num_heads * capacity * tile_bytes, most_bytes)
        return cls(capacity, cdiv(heads.num_heads, passes), nbytes)


@triton.constexpr_function
def tile_of(size: int) -> int:
    """Return the number of elements in the first tile of a head, a power of two; the rest is its tail."""
    whole = max(SMALLEST_TILE, triton.next_power_of_2(size))
    half = whole // 2
    return half if half >= SMALLEST_TILE and tail_of(size, half) < half else whole


@triton.jit
def expands_on_device(query_len: tl.tensor, seq_len: tl.tensor, CROSSOVER: tl.constexpr) -> tl.tensor:
    """Return whether requests are expanded, as latents.expands does; Triton's interpreter cannot call that function."""
    return (seq_len - query_len) * CROSSOVER < query_len * (seq_len - query_len * 0.5)


@quick_launches
@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=TENSORS)
def place_kernel(
    query_start_loc_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    places_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    num_tiles_ptr: tl.tensor,
    num_requests: tl.tensor,
    capacity: tl.tensor,
    CROSSOVER: tl.constexpr,
    TILE_L: tl.constexpr,
) -> None:
    """Assign places in the workspace. Program `request` writes the place of its request, and whose its tiles are.

    query_start_loc_ptr, seq_lens_ptr: see AttentionInputs. places_ptr: int32 [R], the first tile of each request; -1:
    it is not expanded. tiles_ptr: int32 [capacity], the request of each tile. num_tiles_ptr: int32 [1], tiles in use.
    """
    request = tl.program_id(0)
    before, used, tiles, is_expanded = 0, 0, 0, False
    for start in range(0, request + 1, SEARCH_WIDTH):
        rows_S = start + tl.arange(0, SEARCH_WIDTH)
        there_S = rows_S <= request
        query_len_S = tl.load(query_start_loc_ptr + rows_S + 1, mask=there_S, other=0)
        query_len_S -= tl.load(query_start_loc_ptr + rows_S, mask=there_S, other=0)
        seq_len_S = tl.load(seq_lens_ptr + rows_S, mask=there_S, other=0)
        wanted_S = there_S & expands_on_device(query_len_S, seq_len_S, CROSSOVER)
        tiles_S = tl.where(wanted_S, tl.cdiv(seq_len_S, TILE_L), 0)
        end_S = before + tl.cumsum(tiles_S, 0)
        fits_S = wanted_S & (end_S <= capacity)
        used = tl.maximum(used, tl.max(tl.where(fits_S, end_S, 0), 0))
        own_S = (rows_S == request) & fits_S
        tiles = tl.sum(tl.where(own_S, tiles_S, 0), 0)
        is_expanded = tl.sum(own_S.to(tl.int32), 0) > 0
        before += tl.sum(tiles_S, 0)
    place = before - tiles
    tl.store(places_ptr + request, tl.where(is_expanded, place, -1))
    for tile in range(0, tiles, SEARCH_WIDTH):
        tiles_S = tile + tl.arange(0, SEARCH_WIDTH)
        tl.store(tiles_ptr + place + tiles_S, tl.zeros([SEARCH_WIDTH], tl.int32) + request, mask=tiles_S < tiles)
    if request == num_requests - 1:
        tl.store(num_tiles_ptr, used)


@quick_launches
@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=TENSORS)
def expand_rows_kernel(
    cache_ptr: tl.tensor,
    words_ptr: tl.tensor | None,
    weight_ptr: tl.tensor,
    expanded_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    block_table_ptr: tl.tensor,
    places_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    num_tiles_ptr: tl.tensor,
    first_head: tl.tensor,
    table_stride: tl.tensor,
    row_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    OWN: tl.constexpr,
    VALUE: tl.constexpr,
    TILE_L: tl.constexpr,
    TILE_C: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_P: tl.constexpr,
    MULTIPLE: tl.constexpr,
) -> None:
    """Expand latents. Program (tile, part of a head's elements) writes keys and values of TILE_L rows.

    Rows after the end of a context are zeros. cache_ptr, words_ptr: see LatentCache. weight_ptr: [H, OWN + VALUE,
    LATENT]. expanded_ptr: rows of the workspace, for each head from first_head on a key, with its rotated part last,
    then a value. seq_lens_ptr, block_table_ptr: see AttentionInputs. places_ptr, tiles_ptr, num_tiles_ptr: see
    place_kernel. MULTIPLE: a power of two that divides row_stride.
    """
    tile = tl.program_id(0)
    if tile >= tl.load(num_tiles_ptr):
        return
    PARTS: tl.constexpr = (OWN + VALUE + TILE_C - 1) // TILE_C
    head = tl.program_id(1) // PARTS
    part = tl.program_id(1) % PARTS
    request = tl.load(tiles_ptr + tile)
    first_row = (tile - tl.load(places_ptr + request)) * TILE_L
    seq_len = tl.load(seq_lens_ptr + request)
    l_L = tl.arange(0, TILE_L)
    rows_L = first_row + l_L
    stored_L = rows_L < seq_len
    table_ptr = block_table_ptr + request.to(tl.int64) * table_stride
    block_L = blocks_of(table_ptr, rows_L, seq_len, BLOCK_SIZE)
    latent_ptr_L, rotated_ptr_L = row_ptrs(
        LatentCache(cache_ptr, words_ptr, BLOCK_SIZE, LATENT, ROTATED), block_L, rows_L
    )
    columns_C = part * TILE_C + tl.arange(0, TILE_C)
    exists_C = columns_C < OWN + VALUE
    weight_ptr_C = weight_ptr + ((first_head + head) * (OWN + VALUE) + columns_C).to(tl.int64) * LATENT
    r_R = tl.arange(0, TILE_R)
    acc_LC = tl.zeros([TILE_L, TILE_C], tl.float32)
    for start in range(0, LATENT, TILE_R):
        of_latent_R = start + r_R < LATENT
        ptrs_LR = latent_ptr_L[:, None] + start + r_R[None, :]
        latent_LR = tl.load(ptrs_LR, mask=stored_L[:, None] & of_latent_R[None, :], other=0.0)
        ptrs_CR = weight_ptr_C[:, None] + start + r_R[None, :]
        weight_CR = tl.load(ptrs_CR, mask=exists_C[:, None] & of_latent_R[None, :], other=0.0)
        latent_LR = numbers(latent_LR, weight_CR.dtype)
        acc_LC = tl.dot(latent_LR, tl.trans(weight_CR), acc_LC, input_precision="ieee")
    if words_ptr is not None:
        scale_ptr_L = latent_scale_ptrs(LatentCache(cache_ptr, words_ptr, BLOCK_SIZE, LATENT, ROTATED), block_L, rows_L)
        acc_LC *= bfloat16_values(tl.load(scale_ptr_L, mask=stored_L, other=0))[:, None]
    out_rows_L = tl.multiple_of((tile * TILE_L + l_L).to(tl.int64) * row_stride, MULTIPLE)
    out_ptr_L = expanded_ptr + out_rows_L + head * (OWN + ROTATED + VALUE)
    places_C = columns_C + tl.where(columns_C < OWN, 0, ROTATED)
    values_LC = acc_LC.to(expanded_ptr.dtype.element_ty)
    tl.store(out_ptr_L[:, None] + places_C[None, :], values_LC, mask=exists_C[None, :])
    if part == 0:
        p_P = tl.arange(0, TILE_P)
        of_rotated_P = p_P < ROTATED
        ptrs_LP = rotated_ptr_L[:, None] + p_P[None, :]
        rotated_LP = tl.load(ptrs_LP, mask=stored_L[:, None] & of_rotated_P[None, :], other=0.0)
        rotated_LP = rotated_numbers(rotated_LP, expanded_ptr.dtype.element_ty)
        tl.store(out_ptr_L[:, None] + OWN + p_P[None, :], rotated_LP, mask=of_rotated_P[None, :])


@quick_launches
@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=TENSORS)
def attend_expanded_kernel(
    q_ptr: tl.tensor,
    expanded_ptr: tl.tensor,
    out_ptr: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    places_ptr: tl.tensor,
    scale_log2: tl.tensor,
    num_requests: tl.tensor,
    first_head: tl.tensor,
    q_token_stride: tl.tensor,
    out_token_stride: tl.tensor,
    row_stride: tl.tensor,
    Q_HEAD_STRIDE: tl.constexpr,
    OUT_HEAD_STRIDE: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    TILE_L: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_V: tl.constexpr,
    MULTIPLE: tl.constexpr,
) -> None:
    """Compute attention to expanded keys. Program (head, tile number) computes up to TILE_M queries of a request.

    Programs whose tile number is unused, or whose request has no place, return at once. Later tiles see more keys: they
    come first, for all heads, so that programs end at about the same time. Queries of a request with seq_len 0
    (padding) get zeros.

    q_ptr: [T, H, KEY]; out_ptr: [T, H, VALUE]; expanded_ptr: see expand_rows_kernel. query_start_loc_ptr, seq_lens_ptr:
    see AttentionInputs. places_ptr: see place_kernel. TILE_K, TILE_V: see tile_of. MULTIPLE: a power of two that
    divides KEY, VALUE and all strides.
    """
    tl.static_assert(TILE_L % TILE_N == 0, "a tile of keys must not cross the end of a request's rows")
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    request = request_of(query_start_loc_ptr, num_requests, tile, 1, TILE_M)
    place = tl.load(places_ptr + request)
    start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - start
    seq_len = tl.load(seq_lens_ptr + request)
    first_query = (tile - start // TILE_M - request) * TILE_M
    if (place < 0) | (first_query < 0) | (first_query >= query_len):
        return

    queries_M = first_query + tl.arange(0, TILE_M)
    mask_M = queries_M < query_len
    first_position = seq_len - query_len + first_query
    positions_M = seq_len - query_len + queries_M
    of_key = head_elements(KEY, TILE_K)
    tokens_M = (start + queries_M).to(tl.int64)
    q_rows_M = tl.multiple_of(tokens_M * q_token_stride, MULTIPLE) + (first_head + head) * Q_HEAD_STRIDE
    q_parts = load_queries(q_ptr + q_rows_M[:, None], of_key, head_masks(mask_M, of_key, KEY), "")
    of_value = head_elements(VALUE, TILE_V)
    acc_parts = no_sums(TILE_M, of_value)
    max_M = tl.full([TILE_M], LOWEST, tl.float32)
    sum_M = tl.zeros([TILE_M], tl.float32)
    head_ptr = expanded_ptr + (place * TILE_L).to(tl.int64) * row_stride + head * (KEY + VALUE)
    n_N = tl.arange(0, TILE_N)
    end_key = tl.minimum(first_position + TILE_M, seq_len)
    end_unmasked = tl.maximum(first_position + 1, 0) // TILE_N * TILE_N
    # First the tiles that every query sees whole, then the others.
    for masked in tl.static_range(2):
        for key in range(end_unmasked if masked else 0, end_key if masked else end_unmasked, TILE_N):
            keys_N = key + n_N
            key_ptr_N = head_ptr + tl.multiple_of(keys_N.to(tl.int64) * row_stride, MULTIPLE)
            k_parts = load_parts(key_ptr_N, keys_N < end_key, False, KEY, TILE_K)
            scores_MN = scores_of(q_parts, k_parts, None, None, scale_log2, 0.0)
            if masked == 1:
                scores_MN = tl.where(keys_N[None, :] <= positions_M[:, None], scores_MN, float("-inf"))
            weights_MN, rescale_M, max_M = weigh(scores_MN, max_M, scale_log2)
            acc_parts = rescaled(acc_parts, rescale_M)
            sum_M = sum_M * rescale_M + tl.sum(weights_MN, 1)
            v_parts = load_parts(key_ptr_N + KEY, keys_N < end_key, False, VALUE, TILE_V)
            acc_parts = add_values(acc_parts, weights_MN, v_parts, q_parts[0].dtype)
    out_parts = normalised_parts(acc_parts, max_M, sum_M, None, queries_M, mask_M, scale_log2)
    out_rows_M = tl.multiple_of(tokens_M * out_token_stride, MULTIPLE) + (first_head + head) * OUT_HEAD_STRIDE
    store_parts(out_ptr, out_rows_M[:, None], out_parts, of_value, head_masks(mask_M, of_value, VALUE))


class Places(NamedTuple):
    """The places of a step's requests in the workspace, on the device; see place_kernel."""

    places_R: torch.Tensor
    tiles: torch.Tensor
    num_tiles_1: torch.Tensor


def assign_places(requests: Requests, workspace: Workspace, heads: LatentHeads, tiles: ExpandedTiles) -> Places:
    """Return the places of the requests that are expanded."""
    count = requests.num_requests
    plan = requests.seq_lens_R.new_empty(count + workspace.capacity + 1)
    places = Places(plan[:count], plan[count:-1], plan[-1:])
    place_kernel[(count,)](
        requests.query_start_loc_R1,
        requests.seq_lens_R,
        *places,
        count,
        workspace.capacity,
        CROSSOVER=heads.crossover,
        TILE_L=tiles.rows,
        num_warps=1,
    )
    return places


def attend_expanded(
    q_THd: torch.Tensor,
    weight_Cr: torch.Tensor,
    cache_N1P1w: torch.Tensor,
    out_THv: torch.Tensor,
    requests: Requests,
    places: Places,
    workspace: Workspace,
    heads: LatentHeads,
    tiles: ExpandedTiles,
    scale: float,
) -> None:
    """Write to out_THv the attention of all queries of requests with a place, for some heads after the others.

    q_THd, out_THv: [T, H, d] and [T, H, v], last dimension contiguous. weight_Cr: contiguous.
    """
    buffer = q_THd.new_empty(workspace.nbytes // q_THd.element_size())
    sizes = {"VALUE": heads.value, "TILE_L": tiles.rows}
    num_tiles = requests.num_tokens // tiles.queries + requests.num_requests
    for first_head in range(0, heads.num_heads, workspace.heads):
        num_heads = min(workspace.heads, heads.num_heads - first_head)
        row_stride = num_heads * (heads.key + heads.value)
        expand_rows_kernel[(workspace.capacity, num_heads * cdiv(heads.own + heads.value, tiles.columns))](
            cache_N1P1w,
            words_of(cache_N1P1w),
            weight_Cr,
            buffer,
            requests.seq_lens_R,
            requests.block_table_RB,
            *places,
            first_head,
            requests.block_table_RB.stride(0),
            row_stride,
            BLOCK_SIZE=cache_N1P1w.shape[2],
            LATENT=heads.latent,
            ROTATED=heads.rotated,
            OWN=heads.own,
            TILE_C=tiles.columns,
            TILE_R=tiles.chunk,
            TILE_P=next_power_of_2(heads.rotated),
            MULTIPLE=gcd(8, heads.key + heads.value),  # the same for any number of heads
            num_warps=tiles.expand_warps,
            num_stages=tiles.expand_stages,
            enable_fp_fusion=True,
            **sizes,
        )
        attend_expanded_kernel[(num_heads, num_tiles)](
            q_THd,
            buffer,
            out_THv,
            requests.query_start_loc_R1,
            requests.seq_lens_R,
            places.places_R,
            scale * LOG2_E.value,
            requests.num_requests,
            first_head,
            q_THd.stride(0),
            out_THv.stride(0),
            row_stride,
            Q_HEAD_STRIDE=q_THd.stride(1),
            OUT_HEAD_STRIDE=out_THv.stride(1),
            KEY=heads.key,
            TILE_M=tiles.queries,
            TILE_N=tiles.keys,
            TILE_K=tile_of(heads.key),
            TILE_V=tile_of(heads.value),
            MULTIPLE=gcd(8, heads.key, heads.value, q_THd.stride(0), out_THv.stride(0)),
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            enable_fp_fusion=True,
            **sizes,
        )
