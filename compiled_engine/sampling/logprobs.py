"""Log-probabilities of chosen tokens and of the most likely ones, without a tensor of them all.

A log-probability is a logit less the row's logsumexp, so top-k is taken of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compiled_engine.sampling.row_chunks import row_chunks
from compiled_engine.scheduling.step import TokenLogprobs


class PendingLogprobs:
    """Computed on the device as the logits come, fetched when `entries` is called."""

    def __init__(self, logits_RV: torch.Tensor, token_ids_R: torch.Tensor, num_logprobs: Sequence[int]):
        """One entry a row: the chosen token, then the num_logprobs[row] most likely ones (-1: all).

        logits_RV: [R, V] of any floating dtype, computed with in float32. token_ids_R: int64 [R].
        """
        vocab_size = logits_RV.shape[1]
        self._counts = [vocab_size if count == -1 else count for count in num_logprobs]
        self._chunks: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for chunk in row_chunks(*logits_RV.shape):
            logits = logits_RV[chunk].float()
            token_ids_R1 = token_ids_R[chunk, None]
            chosen_R1 = logits.gather(1, token_ids_R1)
            ranks_R = (logits > chosen_R1).sum(dim=-1) + 1
            top = logits.topk(max(self._counts[chunk]), dim=-1)
            values = torch.cat([chosen_R1, top.values], dim=1) - logits.logsumexp(dim=-1, keepdim=True)
            self._chunks.append((torch.cat([token_ids_R1, top.indices], dim=1), values, ranks_R))

    def entries(self) -> list[TokenLogprobs]:
        """Waits for the device."""
        rows = [
            row
            for token_ids, values, ranks in self._chunks
            for row in zip(token_ids.tolist(), values.tolist(), ranks.tolist(), strict=True)
        ]
        return [
            TokenLogprobs(tuple(ids[: count + 1]), tuple(values[: count + 1]), rank)
            for (ids, values, rank), count in zip(rows, self._counts, strict=True)
        ]


def token_logprobs(
    logits_RV: torch.Tensor, token_ids_R: torch.Tensor, num_logprobs: Sequence[int]
) -> list[TokenLogprobs]:
    """The entries of PendingLogprobs at once."""
    return PendingLogprobs(logits_RV, token_ids_R, num_logprobs).entries()
