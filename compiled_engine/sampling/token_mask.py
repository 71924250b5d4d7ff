"""Constraints on a request's next token: users' token masks, and the interface shared with grammars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np

BITS = 32


class TokenMask(Protocol):
    """Protocol of objects that decide which tokens may come next, given the tokens so far.

    Passed as `SamplingParams.token_mask` and called on the host once per token, while the device computes the logits.
    Only sampling waits for the call, so it should be fast. The result should depend only on the argument: then one
    object serves any number of requests and all completions of `n`, and preemption changes nothing. (A parser's state
    can be cached by the tokens.)

    Tokens forbidden by other parameters stay forbidden (min_tokens, bad_words, allowed_token_ids, logits processors).
    Generation ends as without a mask, so a mask should allow an end-of-sequence token where its text may end.

    If `allowed` raises, allows no remaining token, or returns no mask, its request ends with finish_reason "error" and
    the reason in stop_reason. Other requests continue.
    """

    def allowed(self, output_token_ids: Sequence[int]) -> np.ndarray:
        """Return the mask for the next token: int32 or uint32 [ceil(vocabulary / 32)], one bit per token.

        Token t has bit t % 32 of word t // 32, the lowest bit first, as in the masks of xgrammar and llguidance; 1 is
        allowed. Bits beyond the vocabulary are ignored. The engine copies the array, so it may be reused.
        output_token_ids: all tokens generated so far.
        """
        ...


def num_words(vocab_size: int) -> int:
    """Return the length of a token mask in words of 32 bits."""
    return -(-vocab_size // BITS)


def ask(token_mask: TokenMask, output_token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """Call `token_mask.allowed`, and return a copy of its mask, int32 [num_words], without bits beyond the vocabulary.

    Raises ValueError if the call fails, or the result has another type, dtype or shape, or allows no token.
    """
    import numpy as np  # installed wherever masks are computed

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


class Constraint(Protocol):
    """A constraint on a request's next token, with its state after the tokens accepted so far.

    The state survives a preemption, and accepted tokens are never taken back. The methods are called on the host while
    the step that computes the logits runs on the device.
    """

    def accept(self, token_ids: Sequence[int]) -> None:
        """Advance the state by the next output tokens. Raises ValueError with the reason, which ends the request."""
        ...

    def fill(self, words_W: np.ndarray) -> None:
        """Write the mask for the next token: int32 [ceil(vocabulary / 32)], laid out as in TokenMask.

        Raises ValueError as `accept` does.
        """
        ...


class MaskConstraint:
    """Constraint that calls a token mask, and keeps the output tokens to pass to it."""

    def __init__(self, token_mask: TokenMask, vocab_size: int) -> None:
        self._token_mask, self._vocab_size = token_mask, vocab_size
        self._output_token_ids: list[int] = []

    def accept(self, token_ids: Sequence[int]) -> None:
        self._output_token_ids += token_ids

    def fill(self, words_W: np.ndarray) -> None:
        words_W[:] = ask(self._token_mask, self._output_token_ids.copy(), self._vocab_size)
