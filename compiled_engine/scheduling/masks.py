"""The token masks of requests that are about to sample, asked for when all their tokens are known."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from compiled_engine.sampling.token_mask import ask
from compiled_engine.scheduling.request import Request


def ask_for_masks(requests: Iterable[Request], vocab_size: int) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """By request id the masks, and of those that failed what went wrong."""
    masks: dict[str, np.ndarray] = {}
    errors: dict[str, str] = {}
    for request in requests:
        token_mask = request.sampling_params.token_mask
        assert token_mask is not None
        try:
            masks[request.request_id] = ask(token_mask, request.token_ids[request.num_prompt_tokens :], vocab_size)
        except ValueError as error:
            errors[request.request_id] = str(error)
    return masks, errors
