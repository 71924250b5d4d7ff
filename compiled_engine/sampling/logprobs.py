"""Log-probabilities of chosen tokens and of the most likely ones, without a tensor of them all.

A log-probability is a logit less the row's logsumexp, so top-k is taken of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compiled_engine.sampling.row_chunks import row_chunks
from compiled_engine.scheduling.step import TokenLogprobs


def token_logprobs(
    logits_RV: torch.Tensor, token_ids_R: torch.Tensor, num_logprobs: Sequence[int]
) -> list[TokenLogprobs]:
    """One entry a row: the chosen token, then the num_logprobs[row] most likely ones (-1: all).

    logits_RV: [R, V] of any floating dtype, computed with in float32. token_ids_R: int64 [R].
    """
    vocab_size = logits_RV.shape[1]
    entries = []
    for chunk in row_chunks(*logits_RV.shape):
        logits = logits_RV[chunk].float()
        counts = [vocab_size if count == -1 else count for count in num_logprobs[chunk]]
        token_ids_R1 = token_ids_R[chunk, None]
        chosen_R1 = logits.gather(1, token_ids_R1)
        ranks = ((logits > chosen_R1).sum(dim=-1) + 1).tolist()
        top = logits.topk(max(counts), dim=-1)
        token_ids = torch.cat([token_ids_R1, top.indices], dim=1).tolist()
        values = torch.cat([chosen_R1, top.values], dim=1) - logits.logsumexp(dim=-1, keepdim=True)
        entries += [
            TokenLogprobs(tuple(ids[: count + 1]), tuple(row[: count + 1]), rank)
            for ids, row, rank, count in zip(token_ids, values.tolist(), ranks, counts, strict=True)
        ]
    return entries
