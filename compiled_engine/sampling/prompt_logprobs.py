"""Log-probabilities of a prompt's own tokens, a chunk of the prompt at a time."""

from __future__ import annotations

import torch

from compiled_engine.sampling.logprobs import token_logprobs
from compiled_engine.scheduling.step import TokenLogprobs


def prompt_logprobs(logits_TV: torch.Tensor, target_ids_T: torch.Tensor, k: int) -> list[TokenLogprobs]:
    """One entry for each of T positions: the prompt's next token, then the k most likely ones (-1: all).

    logits_TV: [T, V], the model's logits at consecutive prompt positions, of any floating dtype.
    target_ids_T: int64 [T], the tokens at the positions after them. Memory for float32 copies is bounded.
    """
    return token_logprobs(logits_TV, target_ids_T, [k] * len(target_ids_T))
