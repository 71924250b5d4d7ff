"""The token masks of requests that are about to sample, asked for when all their tokens are known."""

from __future__ import annotations

from collections.abc import Iterable

from compiled_engine.sampling.token_mask import ask
from compiled_engine.scheduling.request import Request


def ask_for_masks(requests: Iterable[Request], vocab_size: int) -> tuple[dict[str, bytes], dict[str, str]]:
    """By request id the masks, and of those that failed what went wrong."""
    masks: dict[str, bytes] = {}
    errors: dict[str, str] = {}
    for request in requests:
        assert request.token_mask is not None
        output_token_ids = request.token_ids[request.num_prompt_tokens :]
        try:
            masks[request.request_id] = ask(request.token_mask, output_token_ids, vocab_size).tobytes()
        except ValueError as error:
            errors[request.request_id] = str(error)
    return masks, errors
