"""Attention over a cache of latent rows in plain torch, the reference for the kernels.

A row has w elements. It is the key of all heads, and its first r elements are the value of all heads.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from compiled_engine.attention.inputs import AttentionInputs

# Queries times heads whose scores are computed at a time.
ROWS_PER_CHUNK = 1024


def write_latents(row_T1w: torch.Tensor, cache_N1P1w: torch.Tensor, slot_mapping_T: torch.Tensor) -> None:
    """Store each token's row at its slot; slot -1 stores nothing. On a GPU the host waits for the slots."""
    real_T = slot_mapping_T >= 0
    cache_N1P1w.view(-1, cache_N1P1w.shape[-1]).index_copy_(0, slot_mapping_T[real_T], row_T1w[real_T].squeeze(1))


def attend_latents(
    q_THw: torch.Tensor, cache_N1P1w: torch.Tensor, out_THr: torch.Tensor, inputs: AttentionInputs, scale: float
) -> None:
    """Write causal attention over the rows to `out_THr`, request by request.

    Queries of a request with seq_len 0 (padding) get zeros. The inputs must not have keys_ahead_T.
    """
    assert inputs.keys_ahead_T is None
    starts = inputs.query_start_loc_R1.tolist()
    for request, seq_len in enumerate(inputs.seq_lens_R.tolist()):
        tokens = slice(starts[request], starts[request + 1])
        if seq_len:
            row_Lw = _rows(cache_N1P1w, inputs.block_table_RB[request], seq_len)
            _attend_request(q_THw[tokens], row_Lw, out_THr[tokens], scale)
        else:
            out_THr[tokens] = 0


def _rows(cache_N1P1w: torch.Tensor, block_table_B: torch.Tensor, seq_len: int) -> torch.Tensor:
    block_size, width = cache_N1P1w.shape[2], cache_N1P1w.shape[4]
    blocks_B = block_table_B[: -(-seq_len // block_size)].long()
    return cache_N1P1w.index_select(0, blocks_B).view(-1, width)[:seq_len]


def _attend_request(q_QHw: torch.Tensor, row_Lw: torch.Tensor, out_QHr: torch.Tensor, scale: float) -> None:
    """Write to out_QHr the attention of a request's queries, which are the last of its L positions, over its rows."""
    num_queries, num_heads, width = q_QHw.shape
    latent_Lr, keys_wL = row_Lw[:, : out_QHr.shape[-1]], row_Lw.float().t()
    positions_L = torch.arange(row_Lw.shape[0], device=q_QHw.device)
    position_Q = positions_L[-num_queries:]
    chunk = max(1, ROWS_PER_CHUNK // num_heads)
    for start, stop in pairwise([*range(0, num_queries, chunk), num_queries]):
        rows_Mw = q_QHw[start:stop].reshape(-1, width).float() * scale
        scores_CHL = (rows_Mw @ keys_wL).view(stop - start, num_heads, -1)
        scores_CHL.masked_fill_(positions_L > position_Q[start:stop, None, None], float("-inf"))
        weights_ML = scores_CHL.softmax(-1).flatten(0, 1).to(row_Lw.dtype)
        out_QHr[start:stop] = (weights_ML @ latent_Lr).view(stop - start, num_heads, -1)
