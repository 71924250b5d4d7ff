"""Which tokens may come next, as a request says it: structured output, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

BITS = 32


class TokenMask(Protocol):
    """Decides before each token of a request which ones are allowed, from those that it has already: a grammar, say.

    It is given as `SamplingParams.token_mask` and called on the host, between steps, so it should be quick. The answer
    should depend on its argument alone: then one object serves any number of requests and all completions of `n`, and
    preemption changes nothing. (Who keeps a parser's state can key it by the tokens.)

    Each token has to be known before the next mask can be asked for, so that such a request is not launched ahead: with
    async scheduling it has a share of every second step at most, while the others go on.

    What other parameters forbid stays forbidden (min_tokens, bad_words, allowed_token_ids, logits processors).
    Generation ends as ever, so a mask should allow an end-of-sequence token where its text may end.

    If it raises, allows nothing that remains, or returns what is not a mask, its request ends with finish_reason
    "error", and stop_reason says why. Other requests go on.
    """

    def allowed(self, output_token_ids: Sequence[int]) -> np.ndarray:
        """The mask for the next token: int32 or uint32 [ceil(vocabulary / 32)], a bit for each token.

        Token t has bit t % 32 of word t // 32, the lowest bit first, as in the masks of xgrammar and llguidance: 1 is
        allowed. Bits beyond the vocabulary are ignored. It is copied, so the array may be used again.

        output_token_ids: all tokens generated so far.
        """
        ...


def num_words(vocab_size: int) -> int:
    """The length of a mask."""
    return -(-vocab_size // BITS)


def ask(token_mask: TokenMask, output_token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """The mask as int32 [num_words], a copy. Raises ValueError if it is none, or allows nothing."""
    name = f"{type(token_mask).__qualname__}.allowed"
    where = f"after {len(output_token_ids)} output tokens"
    try:
        given = token_mask.allowed(output_token_ids)
    except Exception as error:
        raise ValueError(f"token_mask: {name} failed {where}: {type(error).__name__}: {error}") from error
    wanted = f"int32 or uint32 [{num_words(vocab_size)}]"
    if not isinstance(given, np.ndarray):
        raise ValueError(f"token_mask: {name} must return a numpy array, {wanted}, got {type(given).__name__} {where}")
    if given.dtype not in (np.int32, np.uint32) or given.shape != (num_words(vocab_size),):
        raise ValueError(f"token_mask: {name} must return {wanted}, got {given.dtype} {list(given.shape)} {where}")
    mask = given.astype(np.uint32)
    if vocab_size % BITS:
        mask[-1] &= np.uint32(2 ** (vocab_size % BITS) - 1)
    if not mask.any():
        raise ValueError(f"token_mask: {name} must allow some token, got none {where}")
    return mask.view(np.int32)
