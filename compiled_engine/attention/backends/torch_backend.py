"""Attention in plain torch: gathers contexts from the paged cache, then computes with dense operations.

It is the reference for the other backends, and chosen where the default backend cannot run a model, such as on a CPU
without a C++ compiler. It runs on every device, for all head and block sizes.
"""

from __future__ import annotations

import math
from itertools import groupby, pairwise

import torch
from torch.nn.functional import embedding_bag, scaled_dot_product_attention

from compiled_engine.attention.backend import AttentionBackend
from compiled_engine.attention.backends.torch_latents import attend_latents, write_latents
from compiled_engine.attention.case import AttentionCase, GraphSupport, Support
from compiled_engine.attention.inputs import AttentionInputs, Scoring
from compiled_engine.attention.kv_codes import decoded, encode, planes, scale_of
from compiled_engine.kv_format import head_dim_of, is_coded

# Keys gathered at a time for a group of decodes: on a CPU they should fit into its cache, on a GPU launches should be
# few.
CPU_GATHER_BYTES = 4 << 20
GPU_GATHER_BYTES = 256 << 20
QUERIES_PER_CHUNK = 256
# Fewest queries in a tile of PyTorch's memory-efficient kernel.
QUERIES_PER_TILE = 32


class TorchBackend(AttentionBackend):
    """Attention in plain torch, see the module."""

    name = "torch"
    default_block_size = 16

    def accept(self, case: AttentionCase) -> Support:
        if case.packed:
            case.require_packed()
            return Support(GraphSupport.NEVER)
        if case.latent_dim:
            case.require_latent()
            return Support(GraphSupport.NEVER)
        case.require_paged()
        # On CUDA decodes do not wait for device data.
        return Support(GraphSupport.UNIFORM_DECODE)

    def write_kv(
        self,
        k_TKd: torch.Tensor,
        v_TKd: torch.Tensor,
        kv_cache_N2PKd: torch.Tensor,
        slot_mapping_T: torch.Tensor,
        kv_scales_2K: torch.Tensor | None = None,
    ) -> None:
        on_cpu = slot_mapping_T.device.type == "cpu"
        write = write_kv_waiting if on_cpu else write_kv_without_waiting
        write(k_TKd, v_TKd, kv_cache_N2PKd, slot_mapping_T, kv_scales_2K)

    def write_latents(
        self, row_T1w: torch.Tensor, cache_N1P1w: torch.Tensor, slot_mapping_T: torch.Tensor, latent_dim: int
    ) -> None:
        write_latents(row_T1w, cache_N1P1w, slot_mapping_T, latent_dim)

    def attend(
        self,
        q_THd: torch.Tensor,
        kv_cache_N2PKd: torch.Tensor,
        out_THd: torch.Tensor,
        inputs: AttentionInputs,
        scoring: Scoring,
    ) -> None:
        num_decodes, _, longest = inputs.host_3.tolist()
        if num_decodes:
            _decode_in_groups(q_THd, kv_cache_N2PKd, out_THd, inputs, num_decodes, longest, scoring)
        prefill_each(q_THd, kv_cache_N2PKd, out_THd, inputs, num_decodes, scoring)

    def attend_latents(
        self,
        q_THd: torch.Tensor,
        weight_Cr: torch.Tensor,
        cache_N1P1w: torch.Tensor,
        out_THv: torch.Tensor,
        inputs: AttentionInputs,
        scale: float,
    ) -> None:
        attend_latents(q_THd, weight_Cr, cache_N1P1w, out_THv, inputs, scale)

    def attend_packed(
        self,
        q_THd: torch.Tensor,
        k_TKd: torch.Tensor,
        v_TKd: torch.Tensor,
        out_THd: torch.Tensor,
        inputs: AttentionInputs,
        scoring: Scoring,
        biases_HW: torch.Tensor | None = None,
    ) -> None:
        """Implement AttentionBackend.attend_packed. Consecutive requests of equal length are computed together."""
        starts, seq_lens = inputs.query_start_loc_R1.tolist(), inputs.seq_lens_R.tolist()
        lens = [end - start for start, end in pairwise(starts)]
        first = 0
        for (length, is_padding), run in groupby(zip(lens, (seq_len == 0 for seq_len in seq_lens), strict=True)):
            count = len(list(run))
            tokens = slice(starts[first], starts[first] + count * length)
            first += count
            if is_padding:
                out_THd[tokens].zero_()
            elif length:
                q, k, v, out = (x[tokens].unflatten(0, (count, length)) for x in (q_THd, k_TKd, v_TKd, out_THd))
                _attend_both_ways(q, k, v, out, scoring, biases_HW)


def _attend_both_ways(
    q_NLHd: torch.Tensor,
    k_NLKd: torch.Tensor,
    v_NLKd: torch.Tensor,
    out_NLHd: torch.Tensor,
    scoring: Scoring,
    biases_HW: torch.Tensor | None,
) -> None:
    """Write to out_NLHd the bidirectional attention within each of N requests of L tokens."""
    length = q_NLHd.shape[1]
    q_NHLd, k_NKLd, v_NKLd = (x.transpose(1, 2) for x in (q_NLHd, k_NLKd, v_NLKd))
    hidden_LL = None
    if 0 < scoring.sliding_window < length:
        positions_L = torch.arange(length, device=q_NLHd.device)
        hidden_LL = (positions_L.unsqueeze(1) - positions_L).abs() >= scoring.sliding_window
    group = q_NHLd.shape[1] // k_NKLd.shape[1]
    if scoring.soft_cap or scoring.sinks_H is not None:
        k_NHLd, v_NHLd = (x.repeat_interleave(group, dim=1) for x in (k_NKLd, v_NKLd))
        scores_NHLL = q_NHLd.float() * scoring.scale @ k_NHLd.float().transpose(-2, -1)
        if biases_HW is not None:
            scores_NHLL += _biases_of(length, biases_HW)
        result_NHLd = _weights(scores_NHLL, hidden_LL, scoring).to(v_NHLd.dtype) @ v_NHLd
    else:
        mask = None if hidden_LL is None else ~hidden_LL
        if biases_HW is not None:
            mask = _biases_of(length, biases_HW).to(q_NHLd.dtype).unsqueeze(0)
            mask = mask if hidden_LL is None else mask.masked_fill(hidden_LL, -math.inf)
        result_NHLd = scaled_dot_product_attention(
            q_NHLd, k_NKLd, v_NKLd, attn_mask=mask, scale=scoring.scale, enable_gqa=group > 1
        )
    out_NLHd.copy_(result_NHLd.transpose(1, 2))


def _biases_of(length: int, biases_HW: torch.Tensor) -> torch.Tensor:
    """Return the biases [H, L, L], fp32, of the scores of each query and key of a text of L tokens."""
    positions_L, farthest = torch.arange(length, device=biases_HW.device), biases_HW.shape[1] // 2
    column_LL = (positions_L - positions_L.unsqueeze(1)).clamp(-farthest, farthest) + farthest
    return biases_HW.float()[:, column_LL]


def write_kv_waiting(
    k_TKd: torch.Tensor,
    v_TKd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    kv_scales_2K: torch.Tensor | None = None,
) -> None:
    """Store K and V of all tokens but padding. The host waits for slots that are on a GPU, to find the padding."""
    block_size = kv_cache_N2PKd.shape[2]
    real_T = slot_mapping_T >= 0
    if not bool(real_T.all()):
        k_TKd, v_TKd, slot_mapping_T = k_TKd[real_T], v_TKd[real_T], slot_mapping_T[real_T]
    if is_coded(kv_cache_N2PKd.dtype):
        block_T, offset_T = slot_mapping_T // block_size, slot_mapping_T % block_size
        for half, values_TKd in enumerate((k_TKd, v_TKd)):
            new = encode(values_TKd, kv_cache_N2PKd.dtype, scale_of(kv_scales_2K, half))
            for plane, values in zip(planes(kv_cache_N2PKd), new, strict=True):
                plane[2 * block_T + half, offset_T] = values
        return
    rows_SKd = kv_cache_N2PKd.view(-1, *kv_cache_N2PKd.shape[3:])
    k_rows_T = slot_mapping_T + (slot_mapping_T // block_size) * block_size
    rows_SKd.index_copy_(0, k_rows_T, k_TKd)
    rows_SKd.index_copy_(0, k_rows_T + block_size, v_TKd)


def write_kv_without_waiting(
    k_TKd: torch.Tensor,
    v_TKd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    kv_scales_2K: torch.Tensor | None = None,
) -> None:
    """Store K and V without reading the slots on the host.

    Padding tokens repeat the first real token's write; without a real token, all write back the present contents.
    """
    block_size = kv_cache_N2PKd.shape[2]
    real_T = slot_mapping_T >= 0
    any_real = real_T.any()
    tokens_T = torch.arange(slot_mapping_T.shape[0], device=slot_mapping_T.device)
    source_T = torch.where(real_T, tokens_T, real_T.int().argmax())
    slots_T = slot_mapping_T[source_T].clamp(min=0)
    if is_coded(kv_cache_N2PKd.dtype):
        block_T, offset_T = slots_T // block_size, slots_T % block_size
        for half, values_TKd in enumerate((k_TKd, v_TKd)):
            new = encode(values_TKd[source_T], kv_cache_N2PKd.dtype, scale_of(kv_scales_2K, half))
            place = 2 * block_T + half, offset_T
            for plane, values in zip(planes(kv_cache_N2PKd), new, strict=True):
                plane[place] = torch.where(any_real, values, plane[place])
        return
    rows_SKd = kv_cache_N2PKd.view(-1, *kv_cache_N2PKd.shape[3:])
    k_rows_T = slots_T + (slots_T // block_size) * block_size
    for values_TKd, rows_T in ((k_TKd, k_rows_T), (v_TKd, k_rows_T + block_size)):
        rows_SKd[rows_T] = torch.where(any_real, values_TKd[source_T], rows_SKd[rows_T])


def _decode_in_groups(
    q_THd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    out_THd: torch.Tensor,
    inputs: AttentionInputs,
    num_decodes: int,
    longest: int,
    scoring: Scoring,
) -> None:
    """Write to out_THd the attention of the first num_decodes requests, computed in groups.

    Groups bound the number of keys that are gathered at a time. longest: upper bound of the contexts; on a CPU their
    true maximum is used, as reading seq_lens costs nothing.
    """
    ragged, gather_bytes = True, GPU_GATHER_BYTES
    if inputs.seq_lens_R.device.type == "cpu":
        seq_lens = inputs.seq_lens_R.tolist()[:num_decodes]
        longest = max(seq_lens)
        if num_decodes == 1 and longest and not scoring.soft_cap and scoring.sinks_H is None:
            _decode_one(q_THd, kv_cache_N2PKd, out_THd, inputs.block_table_RB[0], longest, scoring)
            return
        ragged, gather_bytes = min(seq_lens) < longest or longest == 0, CPU_GATHER_BYTES
    longest = max(longest, 1)
    num_kv_heads, head_dim = kv_cache_N2PKd.shape[3], head_dim_of(kv_cache_N2PKd)
    context = min(longest, scoring.sliding_window or longest)
    group = max(1, gather_bytes // (context * num_kv_heads * head_dim * kv_cache_N2PKd.element_size()))
    for start in range(0, num_decodes, group):
        rows = slice(start, min(start + group, num_decodes))
        _decode(
            q_THd[rows],
            kv_cache_N2PKd,
            out_THd[rows],
            inputs.seq_lens_R[rows].unsqueeze(1),
            inputs.block_table_RB[rows],
            longest,
            ragged,
            scoring,
        )


def _decode(
    q_RHd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    out_RHd: torch.Tensor,
    seq_lens_R1: torch.Tensor,
    block_table_RB: torch.Tensor,
    longest: int,
    ragged: bool,
    scoring: Scoring,
) -> None:
    """Write to out_RHd the attention of one query per request.

    ragged: contexts may have different lengths, up to `longest`; otherwise all have `longest` tokens.
    """
    num_requests, num_heads, head_dim = q_RHd.shape
    block_size, num_kv_heads = kv_cache_N2PKd.shape[2:4]
    sliding_window = scoring.sliding_window
    windowed = 0 < sliding_window < longest
    if windowed:
        # Gather only the blocks that hold the window. From here on, positions count from the first of these blocks.
        first_R1 = (seq_lens_R1 - sliding_window).clamp(min=0)
        skipped_R1 = first_R1 // block_size
        num_blocks = (sliding_window - 2) // block_size + 2
        blocks_RB = skipped_R1 + torch.arange(num_blocks, device=q_RHd.device)
        block_table_RB = block_table_RB.gather(1, blocks_RB.clamp(max=block_table_RB.shape[1] - 1))
        first_R1 = first_R1 - skipped_R1 * block_size
        seq_lens_R1 = seq_lens_R1 - skipped_R1 * block_size
        longest = num_blocks * block_size
    kv_cache_N2PKd, block_table_RB = decoded(kv_cache_N2PKd, block_table_RB, longest, scoring.kv_scales_2K)
    k_rows_RKL = _k_rows(block_table_RB, longest, block_size, num_kv_heads)
    if ragged or windowed:
        positions_L = torch.arange(longest, device=q_RHd.device)
        hidden_RL = positions_L >= seq_lens_R1
        if windowed:
            hidden_RL |= positions_L < first_R1
        hidden_R1L = hidden_RL.unsqueeze(1)
        # A hidden position reads the first key instead: the contents of unused slots must not matter.
        k_rows_RKL = torch.where(hidden_R1L, k_rows_RKL[..., :1], k_rows_RKL)

    rows_Sd = kv_cache_N2PKd.view(-1, head_dim)
    k_BLd = rows_Sd.index_select(0, k_rows_RKL.view(-1)).view(-1, longest, head_dim)
    # The query heads that share a K/V head are the rows of one matrix product.
    q_BGd = q_RHd.reshape(num_requests * num_kv_heads, -1, head_dim).float() * scoring.scale
    scores_RH1L = torch.bmm(q_BGd, k_BLd.float().transpose(1, 2)).view(num_requests, num_heads, 1, longest)
    hidden_R11L = hidden_R1L.unsqueeze(1) if ragged or windowed else None
    weights_RHL = _weights(scores_RH1L, hidden_R11L, scoring).squeeze(2).to(rows_Sd.dtype)
    # A bag is a query head: the weighted sum of its V rows, read straight from the cache.
    v_rows_RKL = k_rows_RKL + block_size * num_kv_heads
    v_rows_RHL = v_rows_RKL.repeat_interleave(num_heads // num_kv_heads, dim=1)
    out_BHd = embedding_bag(
        v_rows_RHL.view(-1, longest), rows_Sd, mode="sum", per_sample_weights=weights_RHL.reshape(-1, longest)
    )
    out_RHd.copy_(out_BHd.view_as(out_RHd))
    if ragged or windowed:
        out_RHd.masked_fill_(seq_lens_R1.unsqueeze(2) == 0, 0)


def _weights(scores_RHQL: torch.Tensor, hidden_RHQL: torch.Tensor | None, scoring: Scoring) -> torch.Tensor:
    """Return attention weights [R, H, Q, L] from scores of R requests, H heads, Q queries and L keys.

    The scores are overwritten. hidden_RHQL: mask of keys that get no weight.
    """
    if scoring.soft_cap:
        scores_RHQL = scores_RHQL.div_(scoring.soft_cap).tanh_().mul_(scoring.soft_cap)
    if hidden_RHQL is not None:
        scores_RHQL.masked_fill_(hidden_RHQL, float("-inf"))
    if scoring.sinks_H is None:
        return scores_RHQL.softmax(-1)
    sinks_RHQ1 = scoring.sinks_H.float().view(-1, 1, 1).expand(*scores_RHQL.shape[:-1], 1)
    return torch.cat((scores_RHQL, sinks_RHQ1), -1).softmax(-1)[..., :-1]


def _decode_one(
    q_THd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    out_THd: torch.Tensor,
    block_table_B: torch.Tensor,
    seq_len: int,
    scoring: Scoring,
) -> None:
    """Write to out_THd the attention of the first request's single query, with few operations.

    For so little work, calling operations takes longer than computing their results.
    """
    if is_coded(kv_cache_N2PKd.dtype):
        block_size = kv_cache_N2PKd.shape[2]
        skipped = max(0, seq_len - scoring.sliding_window) // block_size if scoring.sliding_window else 0
        seq_len, table_1B = seq_len - skipped * block_size, block_table_B[skipped:].unsqueeze(0)
        kv_cache_N2PKd, table_1B = decoded(kv_cache_N2PKd, table_1B, seq_len, scoring.kv_scales_2K)
        block_table_B = table_1B[0]
    num_blocks, _, block_size, num_kv_heads, head_dim = kv_cache_N2PKd.shape
    first = max(0, seq_len - scoring.sliding_window) if scoring.sliding_window else 0
    start, end = first // block_size, -(-seq_len // block_size)
    halves_N2W = kv_cache_N2PKd.view(num_blocks * 2, -1)
    k_halves_B = block_table_B[start:end] * 2
    skipped = start * block_size
    k_LKd, v_LKd = (
        halves_N2W.index_select(0, rows_B).view(-1, num_kv_heads, head_dim)[first - skipped : seq_len - skipped]
        for rows_B in (k_halves_B, k_halves_B + 1)
    )
    # The query heads that share a K/V head take the place of query positions.
    q_1KGd = q_THd[0].to(kv_cache_N2PKd.dtype).view(1, num_kv_heads, -1, head_dim)
    out_1KGd = scaled_dot_product_attention(
        q_1KGd, k_LKd.transpose(0, 1).unsqueeze(0), v_LKd.transpose(0, 1).unsqueeze(0), scale=scoring.scale
    )
    out_THd[0] = out_1KGd.view(-1, head_dim)


def _k_rows(block_table_RB: torch.Tensor, length: int, block_size: int, num_kv_heads: int) -> torch.Tensor:
    """Return the rows [R, K, length] of K in the cache flattened to [N * 2 * P * K, d]; V is P * K rows further."""
    blocks_RB = block_table_RB[:, : -(-length // block_size)].long() * (2 * block_size * num_kv_heads)
    offsets_PK = torch.arange(block_size * num_kv_heads, device=blocks_RB.device).view(block_size, num_kv_heads)
    return (blocks_RB[:, None, :, None] + offsets_PK.t()[:, None, :]).flatten(2)[..., :length].contiguous()


def prefill_each(
    q_THd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    out_THd: torch.Tensor,
    inputs: AttentionInputs,
    num_decodes: int,
    scoring: Scoring,
) -> None:
    """Write to out_THd the attention of the requests after the first num_decodes, one by one."""
    if num_decodes == inputs.seq_lens_R.shape[0]:
        return
    starts = inputs.query_start_loc_R1.tolist()
    for row, seq_len in enumerate(inputs.seq_lens_R.tolist()[num_decodes:], num_decodes):
        tokens = slice(starts[row], starts[row + 1])
        if seq_len:
            table_B, ahead_T = inputs.block_table_RB[row], inputs.keys_ahead_T
            ahead_T = None if ahead_T is None else ahead_T[tokens]
            _prefill(q_THd[tokens], kv_cache_N2PKd, out_THd[tokens], seq_len, table_B, scoring, ahead_T)
        else:
            out_THd[tokens] = 0


def _chunk_bounds(num_queries: int) -> list[int]:
    """Return the borders of the chunks in which a request's queries are computed.

    PyTorch's memory-efficient kernel for GPUs applies a mask wrongly to a query that is alone in a tile, if heads share
    keys. So such a query is a chunk of its own, which needs no mask.
    """
    bounds = [*range(0, num_queries, QUERIES_PER_CHUNK), num_queries]
    if num_queries % QUERIES_PER_TILE == 1 and bounds[-2] != num_queries - 1:
        bounds.insert(-1, num_queries - 1)
    return bounds


def _prefill(
    q_THd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    out_THd: torch.Tensor,
    seq_len: int,
    block_table_B: torch.Tensor,
    scoring: Scoring,
    keys_ahead_T: torch.Tensor | None = None,
) -> None:
    """Write to out_THd the attention of a request's queries, which are the last of its seq_len positions.

    Queries are taken in chunks, each of which gathers only the keys that it sees. keys_ahead_T: see AttentionInputs.
    """
    kv_cache_N2PKd, table_1B = decoded(kv_cache_N2PKd, block_table_B.unsqueeze(0), seq_len, scoring.kv_scales_2K)
    q_THd = q_THd.to(kv_cache_N2PKd.dtype)
    block_size, num_kv_heads, head_dim = kv_cache_N2PKd.shape[2:]
    rows_Sd = kv_cache_N2PKd.view(-1, head_dim)
    k_rows_KL = _k_rows(table_1B, seq_len, block_size, num_kv_heads).squeeze(0)
    positions_L = torch.arange(seq_len, device=q_THd.device)
    context = seq_len - q_THd.shape[0]
    sliding_window = scoring.sliding_window
    for start, stop in pairwise(_chunk_bounds(q_THd.shape[0])):
        q_CHd = q_THd[start:stop]
        first_query, end = context + start, context + stop
        first_key = max(0, first_query - sliding_window + 1) if sliding_window else 0
        queries_C1 = positions_L[first_query:end].unsqueeze(1)
        last_C1 = queries_C1
        if keys_ahead_T is not None:
            last_C1 = queries_C1 + keys_ahead_T[start:stop].unsqueeze(1)
            end = max(end, int(last_C1.max()) + 1)
        keys_L = positions_L[first_key:end]
        visible_CL = keys_L <= last_C1
        if sliding_window:
            visible_CL &= keys_L > queries_C1 - sliding_window
        rows_KL = k_rows_KL[:, first_key:end]
        k_KGLd, v_KGLd = (
            rows_Sd.index_select(0, rows.reshape(-1))
            .view(num_kv_heads, 1, -1, head_dim)
            .expand(-1, q_CHd.shape[1] // num_kv_heads, -1, -1)
            for rows in (rows_KL, rows_KL + block_size * num_kv_heads)
        )
        q_KGCd = q_CHd.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
        if scoring.soft_cap or scoring.sinks_H is not None:
            scores_KGCL = q_KGCd.float() * scoring.scale @ k_KGLd.float().transpose(-2, -1)
            weights_1HCL = _weights(scores_KGCL.flatten(0, 1).unsqueeze(0), ~visible_CL, scoring)
            out_KGCd = weights_1HCL.to(v_KGLd.dtype).view_as(scores_KGCL) @ v_KGLd
        else:
            mask_CL = None if q_CHd.shape[0] == 1 else visible_CL  # a single query sees all keys
            out_KGCd = scaled_dot_product_attention(q_KGCd, k_KGLd, v_KGLd, attn_mask=mask_CL, scale=scoring.scale)
        out_THd[start:stop] = out_KGCd.permute(2, 0, 1, 3).flatten(1, 2)


BACKEND: AttentionBackend = TorchBackend()
