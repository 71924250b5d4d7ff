"""Latent attention in plain torch, the reference for the kernels. attention/latents.py describes its two ways.

A row has w elements, of which the first r are the latent; a cache of 8 bits holds it as latent_codes.py quantises it.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.attention.latent_codes import CodedRows
from compiled_engine.attention.latents import (
    MOST_EXPANDED_BYTES,
    LatentHeads,
    expands,
    key_weights,
    queries_of_latents,
    value_weights,
    write_values,
)
from compiled_engine.kv_format import is_coded

# Queries times heads whose scores are computed at a time.
ROWS_PER_CHUNK = 1024


def write_latents(
    row_T1w: torch.Tensor, cache_N1P1w: torch.Tensor, slot_mapping_T: torch.Tensor, latent_dim: int
) -> None:
    """Store each token's row at its slot; slot -1 stores nothing. On a GPU the host waits for the slots."""
    real_T = slot_mapping_T >= 0
    row_Tw, slot_T = row_T1w[real_T].squeeze(1), slot_mapping_T[real_T]
    if not is_coded(cache_N1P1w.dtype):
        cache_N1P1w.view(-1, cache_N1P1w.shape[-1]).index_copy_(0, slot_T, row_Tw)
        return
    block_size = cache_N1P1w.shape[2]
    new = CodedRows.of(row_Tw, cache_N1P1w.dtype, latent_dim)
    for plane, values in zip(CodedRows.planes(cache_N1P1w, latent_dim), new, strict=True):
        plane[slot_T // block_size, slot_T % block_size] = values


def attend_latents(
    q_THd: torch.Tensor,
    weight_Cr: torch.Tensor,
    cache_N1P1w: torch.Tensor,
    out_THv: torch.Tensor,
    inputs: AttentionInputs,
    scale: float,
) -> None:
    """Write causal attention over the rows to `out_THv`, request by request. Arguments: see `op.latent_attention`.

    Queries of a request with seq_len 0 (padding) get zeros. The inputs must not have keys_ahead_T.
    """
    assert inputs.keys_ahead_T is None
    heads = LatentHeads.of_cache(q_THd, weight_Cr, cache_N1P1w)
    starts = inputs.query_start_loc_R1.tolist()
    for request, seq_len in enumerate(inputs.seq_lens_R.tolist()):
        tokens = slice(starts[request], starts[request + 1])
        if not seq_len:
            out_THv[tokens] = 0
        elif tokens.stop > tokens.start:
            row_Lw = _rows(cache_N1P1w, inputs.block_table_RB[request], seq_len, heads.latent, q_THd.dtype)
            is_expanded = expands(tokens.stop - tokens.start, seq_len, heads.crossover)
            attend = _attend_expanded if is_expanded else _attend_absorbed
            attend(q_THd[tokens], weight_Cr, row_Lw, out_THv[tokens], heads, scale)


def _rows(
    cache_N1P1w: torch.Tensor, block_table_B: torch.Tensor, seq_len: int, latent_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the rows [seq_len, w] of a request, in `dtype` if the cache has 8 bits."""
    block_size, width = cache_N1P1w.shape[2], cache_N1P1w.shape[4]
    blocks_B = block_table_B[: -(-seq_len // block_size)].long()
    if not is_coded(cache_N1P1w.dtype):
        return cache_N1P1w.index_select(0, blocks_B).view(-1, width)[:seq_len]
    planes = CodedRows.planes(cache_N1P1w, latent_dim)
    row_L = CodedRows(*(plane.index_select(0, blocks_B).flatten(0, 1)[:seq_len] for plane in planes))
    return row_L.decoded(cache_N1P1w.dtype, dtype)


def _attend_absorbed(
    q_QHd: torch.Tensor,
    weight_Cr: torch.Tensor,
    row_Lw: torch.Tensor,
    out_QHv: torch.Tensor,
    heads: LatentHeads,
    scale: float,
) -> None:
    """Write to out_QHv the attention of a request's queries, which are the last of its L positions, over its rows."""
    q_QHw = torch.cat((queries_of_latents(q_QHd, weight_Cr, heads), q_QHd[..., heads.own :]), dim=-1)
    latents_QHr = q_QHw.new_empty(*q_QHw.shape[:2], heads.latent)
    row_1Lw = row_Lw.unsqueeze(0)
    _attend(q_QHw.unsqueeze(1), row_1Lw, row_1Lw[..., : heads.latent], latents_QHr.unsqueeze(1), scale)
    write_values(latents_QHr, weight_Cr, heads, out_QHv)


def _attend_expanded(
    q_QHd: torch.Tensor,
    weight_Cr: torch.Tensor,
    row_Lw: torch.Tensor,
    out_QHv: torch.Tensor,
    heads: LatentHeads,
    scale: float,
) -> None:
    """Do the same as `_attend_absorbed`, with the keys and values of a few heads at a time."""
    latent_Lr, rotated_Lp = row_Lw.split((heads.latent, heads.rotated), dim=1)
    bytes_of_head = latent_Lr.shape[0] * (heads.key + heads.value) * row_Lw.element_size()
    count = min(heads.num_heads, max(1, MOST_EXPANDED_BYTES // bytes_of_head))
    q_QH1d, out_QH1v = q_QHd.unsqueeze(2), out_QHv.unsqueeze(2)
    to_keys_Hnr, to_values_Hvr = key_weights(weight_Cr, heads), value_weights(weight_Cr, heads)
    for first in range(0, heads.num_heads, count):
        part = slice(first, first + count)
        own_HLn = latent_Lr @ to_keys_Hnr[part].transpose(1, 2)
        keys_HLd = torch.cat((own_HLn, rotated_Lp.expand(len(own_HLn), -1, -1)), dim=-1)
        values_HLv = latent_Lr @ to_values_Hvr[part].transpose(1, 2)
        _attend(q_QH1d[:, part], keys_HLd, values_HLv, out_QH1v[:, part], scale)


def _attend(
    q_QKGd: torch.Tensor, keys_KLd: torch.Tensor, values_KLv: torch.Tensor, out_QKGv: torch.Tensor, scale: float
) -> None:
    """Write causal attention to out_QKGv, in chunks of queries. G query heads share each of K heads of keys."""
    num_queries, num_kv_heads, group, _ = q_QKGd.shape
    keys_KdL = keys_KLd.float().transpose(1, 2)
    positions_L = torch.arange(keys_KLd.shape[1], device=q_QKGd.device)
    position_Q = positions_L[-num_queries:]
    chunk = max(1, ROWS_PER_CHUNK // (num_kv_heads * group))
    for start, stop in pairwise([*range(0, num_queries, chunk), num_queries]):
        rows_KMd = q_QKGd[start:stop].transpose(0, 1).flatten(1, 2).float() * scale
        scores_KCGL = (rows_KMd @ keys_KdL).unflatten(1, (-1, group))
        scores_KCGL.masked_fill_(positions_L > position_Q[start:stop, None, None], float("-inf"))
        weights_KML = scores_KCGL.softmax(-1).flatten(1, 2).to(values_KLv.dtype)
        out_QKGv[start:stop] = (weights_KML @ values_KLv).unflatten(1, (-1, group)).transpose(0, 1)
