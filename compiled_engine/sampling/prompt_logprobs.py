"""Log-probabilities of a prompt's own tokens, a chunk of the prompt at a time."""

from __future__ import annotations

import numpy as np
import torch

from compiled_engine.sampling.logprobs import DeviceLogprobs, token_logprobs


def prompt_logprobs(logits_TV: torch.Tensor, target_ids_T: torch.Tensor, k: int) -> DeviceLogprobs:
    """One entry for each of T positions: the prompt's next token, then the k most likely ones (-1: all).

    logits_TV: [T, V], the model's logits at consecutive prompt positions, of any floating dtype.
    target_ids_T: int64 [T], the tokens at the positions after them. The host waits for nothing; temporary memory is
    bounded.
    """
    num_tokens = len(target_ids_T)
    return token_logprobs(logits_TV, target_ids_T, np.arange(num_tokens), np.full(num_tokens, k))
