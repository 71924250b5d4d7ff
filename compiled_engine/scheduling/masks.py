"""The token masks of requests that are about to sample, asked for when all their tokens are known."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from compiled_engine.engine_io import EngineOutput
from compiled_engine.sampling.token_mask import ask
from compiled_engine.scheduling.request import Request


def ask_for_masks(
    requests: Iterable[Request], vocab_size: int
) -> tuple[dict[str, np.ndarray], list[tuple[Request, EngineOutput]]]:
    """By request id the masks; the requests whose mask failed, with the output that tells of it."""
    masks: dict[str, np.ndarray] = {}
    failed: list[tuple[Request, EngineOutput]] = []
    for request in requests:
        token_mask = request.sampling_params.token_mask
        assert token_mask is not None
        try:
            masks[request.request_id] = ask(token_mask, request.token_ids[request.num_prompt_tokens :], vocab_size)
        except ValueError as error:
            cached = request.num_cached_tokens or 0
            output = EngineOutput(
                request.request_id, (), finish_reason="error", stop_reason=str(error), num_cached_tokens=cached
            )
            failed.append((request, output))
    return masks, failed
